"""An SGLang engine as the lines drive it, what transformers answers, and configs of kvport for it."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

from connectors import configs, line
from rig import Engine, Failed, Result, environment

HERE = pathlib.Path(__file__).resolve().parent
PAGE = 16
TOKENS = 16
# Where it is counted what comes from the store, nothing is given up because a machine is busy.
UNHURRIED = {"exists_ms": 20_000, "get_ms": 60_000, "put_ms": 60_000}
PATIENT = {"heartbeat": {"limit": "30s"}, "deadlines": {"transfer": "60s", "save": "60s", "later": "20s"}}
LAYOUTS = {"page_first": "kernel", "page_first_direct": "direct", "layer_first": "direct"}


def full(prompt, page=PAGE):
    """Tokens of a prompt that can come from a cache: whole pages, never the last token."""
    return (len(prompt) - 1) // page * page


def stored(rig):
    """(setup, extra config) of every setup whose fixture names these tests."""
    return configs(rig, line("sglang"))


def extra(connector, config, settings=None, kvport=None, **more):
    """SGLang's --hicache-storage-backend-extra-config for a connector; children have its role."""
    if "connectors" in config:
        config = {"connectors": [{**child, "kv_role": "kv_both"} for child in config["connectors"]]}
    inner = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": config, "kvport": kvport or PATIENT}
    return {"backend_name": "kvport", "module_path": "kvport_sglang", "class_name": "KvportHiCache", "interface_v1": 1, "allocator": "shm",
            "prefetch_threshold": PAGE, "kv_transfer_config": inner, "kvport_sglang": settings or UNHURRIED, **more}


class SGLang(Engine):
    """One engine of SGLang, with all its processes; see engine.py."""

    def __init__(self, rig, name, config=None, layout="page_first", env=None, **arguments):
        self.rig, self.name, self.log = rig, name, rig.folder / f"{name}.log"
        self.calls_log = rig.folder / f"{name}.calls"
        deps = rig.options.sglang
        given = {"model_path": str(rig.model), "hicache_mem_layout": layout, "hicache_io_backend": LAYOUTS[layout], **arguments}
        if config is not None:
            given.update(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=json.dumps(config))
        env = environment({"PYTHONPATH": os.pathsep.join(map(str, (HERE / "stubs", deps / "overlay"))), "SGLANG_USE_CPU_ENGINE": "1",
                           "TORCH_EXTENSIONS_DIR": str(deps / "extensions"), "PYTHONPYCACHEPREFIX": str(deps / "pycache"),
                           "CALLS_LOG": str(self.calls_log), **(env or {})})
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # three processes would compile everything again
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen([sys.executable, str(HERE / "engine.py"), json.dumps(given)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=rig.folder)
        rig.processes.append(self)
        self.listen()
        self.ready = self.answer("ready", 600)
        rig.say(f"{name} is up after {self.ready:.0f} s")

    def ask(self, op, timeout=600, **call):
        """Make a call, and give its answer."""
        self.tell(op=op, **call)
        return self.answer(op, timeout)

    def run(self, prompts, tokens=TOKENS, salt="", timeout=600):
        """Answer prompts, all at once."""
        return [Result(r) for r in self.ask("run", timeout, prompts=prompts, max=tokens, salt=salt)]

    def flush(self):
        """Empty the caches of device and host, once nothing is written to the store any more."""
        self.rig.until(lambda: self.ask("flush"), f"{self.name}: emptying its caches", 60)

    def calls(self, *methods):
        """What SGLang has asked the backend, in order."""
        if not self.calls_log.exists():
            return []
        rows = [json.loads(text) for text in self.calls_log.read_text(encoding="utf-8").splitlines()]
        return [r for r in rows if not methods or r["method"] in methods]

    def number(self, name, *labels):
        """Add up a number of the backend's over all labels that contain the given ones."""
        with contextlib.suppress(OSError, ValueError):
            numbers = json.loads(pathlib.Path(f"{self.calls_log}.numbers").read_text(encoding="utf-8"))
            return int(sum(v for k, v in numbers.items() if k.split("{")[0] == name and all(label in k for label in labels)))
        return 0

    def settled(self, pages, timeout=120):
        """Wait until that many pages in all have been put."""
        put = lambda: sum(r["done"] for r in self.calls("batch_set_v1", "batch_set"))  # noqa: E731
        self.rig.until(lambda: put() >= pages, f"{self.name}: {pages} pages put, {put()} so far", timeout)

    def quiet(self):
        """Wait until a second passes without a put."""

        seen = -1
        while (now := len(self.calls())) != seen:
            seen = now
            time.sleep(1)


class Answers:
    """What transformers answers, computed once for each model."""

    def __init__(self, python, file):
        self.python, self.file, self.known = python, file, {}
        if file and file.exists():
            self.known = json.loads(file.read_text(encoding="utf-8"))

    def want(self, rig, prompts, tokens=TOKENS, model=None):
        """Give the answers to prompts."""
        model = str(model or rig.model)
        key = lambda p: f"{model} {tokens} {' '.join(map(str, p))}"  # noqa: E731
        missing = [p for p in prompts if key(p) not in self.known]
        if missing:
            done = subprocess.run([self.python, str(HERE / "reference.py"), model], input=json.dumps({"tokens": tokens, "prompts": missing}),
                                  capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            if done.returncode != 0:
                raise Failed("transformers did not answer:\n" + done.stderr[-2000:])
            self.known.update(zip(map(key, missing), json.loads(done.stdout), strict=True))
            if self.file:
                self.file.write_text(json.dumps(self.known), encoding="utf-8")
            rig.say(f"transformers has answered {len(missing)} prompts")
        return [Result(ids=self.known[key(p)], finish="length") for p in prompts]


def check_cached(rig, what, results, prompts, tier, page=PAGE):
    """Every whole page of each prompt came from one tier."""
    for prompt, result in zip(prompts, results, strict=True):
        got = result.cached[tier]
        rig.check(got >= full(prompt, page), f"{what}: {result.cached} of {len(prompt)} tokens were cached, want {full(prompt, page)} from {tier}")
        rig.count(f"tokens from {tier}", got)


