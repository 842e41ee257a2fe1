"""An SGLang engine as the lines drive it, what transformers answers, and configs of kvport for it."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from connectors import configs, fixtures, line, storage
from connectors import setups as every
from rig import ROOT, Engine, Failed, Result, environment, tail

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


def setups():
    """The names that --connector takes: of connectors, and of ways to set them up."""
    found = [s for s in every()[0] if line("sglang")(s)]
    return {s.connector for s in found} | {s.label for s in found}


def named():
    """The connectors whose fixtures name these tests, built or not."""
    return {name for name, f in fixtures().items() if any("sglang" in s.get("lines", ()) for s in f.get("vllm", ()))}


def extra(connector, config, settings=None, kvport=None, **more):
    """SGLang's --hicache-storage-backend-extra-config for a connector; children have its role."""
    if "connectors" in config:
        config = {"connectors": [{**child, "kv_role": "kv_both"} for child in config["connectors"]]}
    inner = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": config, "kvport": kvport or PATIENT}
    return {"backend_name": "kvport", "module_path": "kvport_sglang", "class_name": "KvportHiCache", "interface_v1": 1, "allocator": "shm",
            "prefetch_threshold": PAGE, "kv_transfer_config": inner, "kvport_sglang": settings or UNHURRIED, **more}


def surroundings(rig, more):
    """What the environment of SGLang's processes has beside that of others."""
    deps = rig.options.sglang
    return {"PYTHONPATH": os.pathsep.join(map(str, (HERE / "stubs", deps / "overlay"))), "SGLANG_USE_CPU_ENGINE": "1",
            "TORCH_EXTENSIONS_DIR": str(deps / "extensions"), "PYTHONPYCACHEPREFIX": str(deps / "pycache"),
            "PYTHONDONTWRITEBYTECODE": "",  # three processes would compile everything again
            "PATH": os.pathsep.join(map(str, (pathlib.Path(sys.executable).parent, ROOT / "bin", os.environ["PATH"]))),  # with the ninja of this Python
            **more}


class SGLang(Engine):
    """One engine of SGLang, with all its processes; see engine.py."""

    def __init__(self, rig, name, config=None, layout="page_first", env=None, folder=None, **arguments):
        folder = folder or rig.folder
        self.rig, self.name, self.log = rig, name, folder / f"{name}.log"
        self.calls_log, self.ours = folder / f"{name}.calls", config is not None
        given = {"model_path": str(rig.model), "hicache_mem_layout": layout, "hicache_io_backend": LAYOUTS[layout], **arguments}
        if config is not None:
            given.update(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=json.dumps(config))
        env = environment(surroundings(rig, {"CALLS_LOG": str(self.calls_log), **(env or {})}))
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen([sys.executable, str(HERE / "engine.py"), json.dumps(given)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=folder)
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
        with Lateness() as lateness:
            results = self.ask("run", timeout, prompts=prompts, max=tokens, salt=salt)
        return [Result(r, late=lateness.seconds) for r in results]

    def flush(self):
        """Empty the caches of device and host. SGLang refuses while anything is being written, to the store too, so afterwards nothing is."""
        self.rig.until(lambda: self.ask("flush"), f"{self.name}: emptying its caches", 120)

    def leave(self):
        """Stop it once everything is stored."""
        self.flush()
        self.stop()

    def rows(self):
        """What was written down about calls, in order: a row when one begins, and one with "seconds" when it ends."""
        if not self.calls_log.exists():
            return []
        return [json.loads(text) for text in self.calls_log.read_text(encoding="utf-8").splitlines()]

    def calls(self, *methods):
        """What SGLang has asked the backend, in the order in which it ended."""
        return [r for r in self.rows() if "seconds" in r and (not methods or r["method"] in methods)]

    def open_calls(self):
        """The calls that have begun and not ended."""
        rows = self.rows()
        ended = {r["call"] for r in rows if "seconds" in r}
        return [r for r in rows if r["call"] not in ended]

    def settle(self, timeout=120):
        """Wait until every call has ended, also one that SGLang has given up."""
        self.rig.until(lambda: not self.open_calls(), f"{self.name}: the end of its calls", timeout)

    def check_calls(self, timeout=120):
        """Fail unless every call ends within some seconds, and none of them by raising."""
        with contextlib.suppress(Failed):
            self.settle(timeout)
        if missing := self.open_calls():
            raise Failed(f"{self.name}: calls have not ended: {missing}")
        if raised := [r for r in self.rows() if r.get("raised")]:
            raise Failed(f"{self.name}: calls have raised: {raised}")
        if self.ours and (faults := self.number("kvport_sglang_faults_total")):
            raise Failed(f"{self.name}: {faults} exceptions were caught in the backend")

    def numbers(self, timeout=30):
        """The backend's numbers, written after this was called."""
        path, asked = pathlib.Path(f"{self.calls_log}.numbers"), time.time()
        self.rig.until(lambda: path.exists() and path.stat().st_mtime > asked, f"{self.name}: new numbers of the backend", timeout)
        return json.loads(path.read_text(encoding="utf-8"))

    def number(self, name, *labels):
        """Add up a number of the backend's over all labels that contain the given ones."""
        return int(sum(v for k, v in self.numbers().items() if k.split("{")[0] == name and all(label in k for label in labels)))

    def shows(self, name, value):
        """Wait until SGLang's page of metrics shows a value, summed over labels. It is renewed with a step, once a second."""
        def shown():
            self.ask("flush")
            return self.ask("metrics").get(name) == value
        self.rig.until(shown, f"{self.name}: {name} of {value} on SGLang's page of metrics")


class Ahead:
    """Engines of a line, each started while the one before is in use: a start takes longer than most of what is asked of it."""

    def __init__(self, starts):
        self.thread, self.starts = ThreadPoolExecutor(1), iter(starts)
        self.begin()

    def begin(self):
        """Have the next one started."""
        start = next(self.starts, None)
        self.coming = start and self.thread.submit(start)

    def take(self):
        """Give the next one, and begin with the one after it."""
        engine = self.coming.result()
        self.begin()
        return engine


class Shared:
    """Two engines that lines use one after another, since a start takes longer than most of them: kvport's, and SGLang's own file backend."""

    def __init__(self, scratch):
        self.folder, self.engines = pathlib.Path(scratch) / "shared", {}
        self.blocks, self.own = self.folder / "blocks", self.folder / "own"

    def kvport(self, rig):
        """The engine that keeps pages in one store of files."""
        _, connector, config = storage(rig, self.blocks)
        return self.engine(rig, "kvport", extra(connector, config))

    def file(self, rig):
        """The engine with SGLang's own backend."""
        return self.engine(rig, "file", None, env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.own)}, hicache_storage_backend="file",
                           hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE}))

    def both(self, rig):
        """Both, kvport's first; where neither runs yet, they start at the same time."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda start: start(rig), (self.kvport, self.file)))

    def engine(self, rig, name, config, **more):
        """Give an engine with empty caches to a line; start it if none has."""
        if name not in self.engines:
            self.folder.mkdir(exist_ok=True)
            self.engines[name] = SGLang(rig, name, config, folder=self.folder, enable_metrics=True, **more)
            rig.processes.remove(self.engines[name])  # which end with the line
        self.engines[name].rig = rig
        self.engines[name].flush()
        return self.engines[name]

    def stop(self):
        """End them."""
        for engine in self.engines.values():
            engine.stop()
        self.engines.clear()


class Lateness:
    """By how many seconds sleeps are too long: what a busy machine adds to a time."""

    BEAT = 0.05

    def __enter__(self):
        self.seconds, self.over = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)
        self.thread.start()
        return self

    def beat(self):
        """Sleep and look at the clock until the end."""
        while not self.over.is_set():
            begun = time.monotonic()
            time.sleep(self.BEAT)
            self.seconds += max(0.0, time.monotonic() - begun - self.BEAT)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


class Answers:
    """What transformers answers, computed once for each model, by one process: its start takes as long as the answers of a line."""

    def __init__(self, python, file, log):
        self.file, self.log, self.known = file, log, {}
        if file and file.exists():
            self.known = json.loads(file.read_text(encoding="utf-8"))
        with open(log, "w", encoding="utf-8") as to:
            self.process = subprocess.Popen([python, str(HERE / "reference.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=to, text=True,
                                            env={**os.environ, "HF_HUB_OFFLINE": "1"})

    def want(self, rig, prompts, tokens=TOKENS, model=None):
        """Give the answers to prompts."""
        model = str(model or rig.model)
        key = lambda p: f"{model} {tokens} {' '.join(map(str, p))}"  # noqa: E731
        missing = [p for p in prompts if key(p) not in self.known]
        if missing:
            self.known.update(zip(map(key, missing), self.ask(model, missing, tokens), strict=True))
            if self.file:
                self.file.write_text(json.dumps(self.known), encoding="utf-8")
            rig.say(f"transformers has answered {len(missing)} prompts")
        return [Result(ids=self.known[key(p)], finish="length") for p in prompts]

    def ask(self, model, prompts, tokens):
        """Have the process answer."""
        try:
            self.process.stdin.write(json.dumps({"model": model, "tokens": tokens, "prompts": prompts}) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise Failed("transformers did not answer:\n" + tail(self.log)) from None

    def stop(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def check_cached(rig, what, results, prompts, tier, page=PAGE):
    """Every whole page of each prompt came from one tier."""
    for prompt, result in zip(prompts, results, strict=True):
        got = result.cached[tier]
        rig.check(got >= full(prompt, page), f"{what}: {result.cached} of {len(prompt)} tokens were cached, want {full(prompt, page)} from {tier}")
        rig.count(f"tokens from {tier}", got)


