"""Processes of the tests: engines, `vllm serve`, `kvport route`, LMCache; and what a run counts."""

import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request

from prompts import Prompts

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
BLOCKS = 192  # of an engine's cache unless a test says otherwise: 6,144 tokens
HASH = {"prefix_caching_hash_algo": "sha256"}


class Failed(Exception):
    """A promise that was not kept."""


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(extra=None):
    """What vLLM needs to run on a CPU without asking any network."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_KVCACHE_SPACE="1",
               VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", PYTHONHASHSEED="0", VLLM_HOST_IP="127.0.0.1",
               GLOO_SOCKET_IFNAME="lo", VLLM_LOGGING_LEVEL="INFO", TOKENIZERS_PARALLELISM="false",
               PATH=f"{ROOT / 'bin'}{os.pathsep}{os.environ['PATH']}")
    path = [str(ROOT / "python")] + ([extra.pop("PYTHONPATH")] if extra and "PYTHONPATH" in extra else [])
    env["PYTHONPATH"] = os.pathsep.join(path)
    env.update(extra or {})
    return env


def descendants(pid):
    """All living processes below one, as {pid: command line}."""
    children, names = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text()
                fields = stat.rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
                    names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    found, todo = {}, [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found[child] = names[child]
            todo.append(child)
    return found


class Result(dict):
    """The end of a request, with its fields as attributes."""

    __getattr__ = dict.__getitem__


class Engine:
    """A vLLM engine in one process; see engine.py."""

    def __init__(self, rig, name, kv=None, engine=None, isa="", hide="", env=None):
        self.rig, self.name, self.serial = rig, name, 0
        args = {"model": str(rig.model), "num_gpu_blocks_override": BLOCKS, **HASH, **(engine or {})}
        config = {"kv": kv, "engine": args, "isa": isa, "hide": hide}
        self.log = rig.folder / f"{name}.log"
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen([sys.executable, str(HERE / "engine.py"), json.dumps(config)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log, text=True, env=environment(env), cwd=rig.folder)
        rig.processes.append(self)
        self.listen()
        self.ready = self.answer("ready", 600)

    def listen(self):
        """Begin to take what the engine tells."""
        self.results, self.answers, self.arrived = {}, queue.Queue(), threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        """Sort what the engine tells into results and answers."""
        for line in self.process.stdout:
            message = json.loads(line)
            if "id" in message:
                with self.arrived:
                    self.results[message["id"]] = Result(message)
                    self.arrived.notify_all()
            else:
                self.answers.put(message)
        self.answers.put(None)
        with self.arrived:
            self.arrived.notify_all()

    def tell(self, **call):
        """Send one call."""
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def answer(self, key, timeout=60):
        """The next answer, which is of the given kind."""
        try:
            message = self.answers.get(timeout=timeout)
        except queue.Empty:
            raise Failed(f"{self.name} did not answer with {key} in {timeout} s; see {self.log}") from None
        if message is None:
            raise Failed(f"{self.name} has ended:\n" + tail(self.log))
        return message[key]

    def ask(self, op, key=None, **call):
        """A call with an answer."""
        self.tell(op=op, **call)
        return self.answer(key or op)

    def add(self, ids, tokens, kvp=None, **more):
        """Begin a request; its id."""
        self.serial += 1
        rid = f"{self.name}-{self.serial}"
        self.tell(op="add", id=rid, ids=ids, max=tokens, kvp=kvp, **more)
        return rid

    def together(self, prompts, tokens):
        """The results of requests that all wait before the engine's next step."""
        adds = []
        for ids in prompts:
            self.serial += 1
            adds.append({"id": f"{self.name}-{self.serial}", "ids": ids, "max": tokens})
        self.tell(op="together", adds=adds)
        return [self.wait(add["id"]) for add in adds]

    def wait(self, rid, timeout=240):
        """The result of a request."""
        end = time.monotonic() + timeout
        with self.arrived:
            while rid not in self.results:
                left = end - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    raise Failed(f"{self.name}: request {rid} did not end within {timeout} s:\n" + tail(self.log))
                self.arrived.wait(min(left, 1))
            return self.results.pop(rid)

    def run(self, ids, tokens, kvp=None, **more):
        """One request from begin to end."""
        return self.wait(self.add(ids, tokens, kvp, **more))

    def all(self, prompts, tokens, together=1):
        """The results of many requests, so many at a time."""
        out, open_ = [], []
        for ids in prompts:
            if len(open_) == together:
                out.append(self.wait(open_.pop(0)))
            open_.append(self.add(ids, tokens))
        return out + [self.wait(rid) for rid in open_]

    def reset(self, timeout=20):
        """Empty the engine's own prefix cache, once saves have let go of their blocks."""
        end = time.monotonic() + timeout
        while not self.ask("reset"):
            if time.monotonic() > end:
                raise Failed(f"{self.name}: the prefix cache cannot be reset, blocks are in use: {self.ask('pool')}")
            time.sleep(0.05)

    def metrics(self):
        """All counters."""
        return self.ask("metrics")

    def external(self):
        """Tokens that came from the connector until now."""
        return int(self.metrics().get("vllm:prompt_tokens_by_source_total:external_kv_transfer", 0))

    def settle(self, nudge, timeout=30):
        """Wait until no block is in use and the engine is idle; nudge is a prompt that makes it step."""
        end = time.monotonic() + timeout
        while True:
            pool = self.ask("pool")
            if pool["used"] == 0 and pool["requests"] == 0 and not pool["has_requests"] and pool["free"] == pool["blocks"] - 1:
                return pool
            if time.monotonic() > end:
                raise Failed(f"{self.name}: blocks or requests are left: {pool}")
            time.sleep(0.1)
            self.run(nudge, 1)

    def kin(self):
        """Living processes below the engine, as {pid: command line}."""
        return descendants(self.process.pid)

    def alive(self):
        """Whether the engine runs."""
        return self.process.poll() is None

    def stop(self):
        """Shut it down."""
        if self.alive():
            with contextlib.suppress(OSError):
                self.tell(op="quit")
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def tail(path, lines=25):
    """The end of a log."""
    return "\n".join(pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Server:
    """A process with an HTTP port."""

    def __init__(self, rig, name, command, port, env=None, ready="/health", timeout=600):
        self.rig, self.name, self.url = rig, name, f"http://127.0.0.1:{port}"
        self.log = rig.folder / f"{name}.log"
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=rig.folder,
                                            env=environment(env), start_new_session=True)
        rig.processes.append(self)
        end = time.monotonic() + timeout
        while ready:
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + ready, timeout=5) as answer:
                if answer.status == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                raise Failed(f"{name} did not come up:\n" + tail(self.log))
            time.sleep(0.2)

    def post(self, path, body, timeout=300):
        """POST JSON; (status, JSON)."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as err:
            return err.code, json.loads(err.read() or b"{}")

    def get(self, path):
        """GET as text."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def complete(self, ids, tokens, **more):
        """Greedy completion; (status, JSON)."""
        return self.post("/v1/completions", {"model": "m", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                                             "return_token_ids": True, **more})

    def run(self, ids, tokens, **more):
        """The tokens of a greedy completion."""
        status, answer = self.complete(ids, tokens, **more)
        if status != 200:
            raise Failed(f"{self.name} answered {status}: {answer}")
        choice = answer["choices"][0]
        return Result(ids=choice["token_ids"], finish=choice["finish_reason"], kvp=answer.get("kv_transfer_params"))

    def all(self, prompts, tokens, together=1):
        """The results of many completions, so many at a time."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(lambda ids: self.run(ids, tokens), prompts))

    def reset(self):
        """Empty the engine's own prefix cache, once saves have let go of their blocks."""
        self.rig.until(lambda: self.post("/reset_prefix_cache", {})[1].get("success"), f"{self.name}: resetting the prefix cache")

    def counter(self, name, *labels):
        """The sum of a counter of /metrics over the lines with all the labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            if line.replace("{", " ").split(" ")[0] == name and all(label in line for label in labels):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def external(self):
        """Tokens that came from the connector until now."""
        return int(self.counter("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'))

    def kin(self):
        """Living processes below this one, as {pid: command line}."""
        return descendants(self.process.pid)

    def alive(self):
        """Whether it runs."""
        return self.process.poll() is None

    def stop(self):
        """Interrupt it, then kill what is left of its process group."""
        below = descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def serve(rig, name, kv=None, args=(), env=None):
    """`vllm serve` in its normal form with several processes."""
    port = free_port()
    vllm = pathlib.Path(sys.executable).parent / "vllm"  # run by this Python: its first line names the folder of its installation
    command = [sys.executable, str(vllm), "serve", str(rig.model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port),
               "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager", "--block-size", "32",
               "--num-gpu-blocks-override", str(BLOCKS), "--prefix-caching-hash-algo", "sha256", *args]
    if kv:
        command += ["--kv-transfer-config", json.dumps(kv)]
    return Server(rig, name, command, port, env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_PORT": str(free_port()), **(env or {})})


class Rig:
    """One line of acceptance: its processes, its folder, its counts."""

    def __init__(self, options, name):
        self.options, self.name, self.begun = options, name, time.monotonic()
        self.model = options.deps / "model-f32"
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"kvport-vllm-{name}-", dir=options.scratch))
        self.processes, self.counts, self.notes = [], {}, []
        self.prompts = Prompts(ROOT, self.model, options.seed)

    def count(self, what, n=1):
        """Add to a count that the report shows."""
        self.counts[what] = self.counts.get(what, 0) + n

    def say(self, what):
        """Print how far it is: a line takes minutes."""
        print(f"  {time.monotonic() - self.begun:4.0f} s  {what}", flush=True)

    def show(self, what, value):
        """Put a measured value into the report."""
        self.counts[what] = value
        self.say(f"{what}: {value}")

    def check(self, ok, message):
        """Fail the line unless ok."""
        if not ok:
            raise Failed(message)

    def equal(self, what, want, got):
        """Compare results token for token."""
        self.check(len(want) == len(got), f"{what}: {len(got)} results, want {len(want)}")
        for i, (w, g) in enumerate(zip(want, got)):
            if list(w.ids) != list(g.ids):
                at = next((k for k, (a, b) in enumerate(zip(w.ids, g.ids)) if a != b), min(len(w.ids), len(g.ids)))
                raise Failed(f"{what}: answer {i} is not what it must be, from token {at} of {len(w.ids)} on (finish {g.finish}): {g.ids} != {w.ids}")
            self.count("tokens equal", len(w.ids))

    def until(self, condition, what, timeout=30):
        """Wait for a condition."""
        end = time.monotonic() + timeout
        while not (value := condition()):
            self.check(time.monotonic() < end, f"{what}: not within {timeout} s")
            time.sleep(0.02)
        return value

    def close(self, keep):
        """Stop everything; the folder with the logs stays when asked."""
        for process in reversed(self.processes):
            with contextlib.suppress(Exception):
                process.stop()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def kvport(connector, extra, role="kv_both", policy="recompute", **more):
    """vLLM's --kv-transfer-config with a kvport connector inside; children have its role."""
    if "connectors" in extra:
        extra = {"connectors": [{**child, "kv_role": role} for child in extra["connectors"]]}
    return {"kv_connector": "KvportConnector", "kv_connector_module_path": "kvport_vllm", "kv_role": role, "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"kv_connector": connector, "kv_connector_extra_config": extra, **more}}


def run_line(rig, name, promise, check, keep):
    """Run one line with a rig of its own, close it, and give the line's report."""
    print(f"\n== {name}: {promise}", flush=True)
    start, error = time.monotonic(), ""
    try:
        check(rig)
    except Failed as err:
        error = str(err)
    except Exception:  # a broken test is a failed line
        error = traceback.format_exc()
    finally:
        rig.close(keep or error)
    seconds = round(time.monotonic() - start)
    counts = ", ".join(f"{value} {what}" if isinstance(value, int) else f"{what} {value}" for what, value in rig.counts.items())
    load = os.getloadavg()[1]  # of the last 5 minutes: what times are worth
    print(f"== {name}: {'FAILED' if error else 'ok'} in {seconds} s at a load of {load:.1f}: {counts}", flush=True)
    for note in rig.notes:
        print(f"   {note}")
    if error:
        print(f"   {error}\n   logs are in {rig.folder}", flush=True)
    return {"line": name, "promise": promise, "ok": not error, "seconds": seconds, "load": load, "counts": rig.counts, "notes": rig.notes, "error": error}
