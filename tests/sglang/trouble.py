"""Lines about stores that fail, processes that die, and time."""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time

from connectors import Valkey, listens, storage, storage_plugin
from faults import PATIENT as BREAKER
from faults import meet, moved, process
from rig import ROOT, Failed, free_port
from served import SGLang, check_cached, extra, full, stored

SLACK = 4.0  # seconds that a busy machine may add to a deadline; verdicts, not measurements


def rounds(rig):
    """What is done in each round: (victim, signal)."""
    n = rig.options.kills
    out = [("plugin", signal.SIGSTOP if i % 4 == 3 else signal.SIGKILL) for i in range(n)]
    out += [("agent", signal.SIGKILL)] * max(1, n // 6)
    random.Random(rig.options.seed).shuffle(out)
    return out


def kills(rig):
    """Kill and stop the plugin and kill the agent while pages are loaded."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    settings = {"exists_ms": 5_000, "get_ms": 10_000, "put_ms": 10_000}
    engine = SGLang(rig, "engine", extra(connector, config, settings, BREAKER))
    prompts = rig.prompts.set("killed", [900, 800, 700])
    want = rig.want(prompts)
    rig.equal("cold", want, engine.run(prompts))
    rng, todo, longest = random.Random(rig.options.seed), rounds(rig), 0.0
    for at, (victim, signum) in enumerate(todo):
        if at % 5 == 0:
            rig.say(f"{at} of {len(todo)} rounds")
        engine.quiet()
        engine.flush()
        word = "agent" if victim == "agent" else storage_plugin()
        plugin, pid = process(engine, storage_plugin()), process(engine, word)
        rig.check(bool(plugin and pid), f"no {victim} is running: {engine.kin()}")
        before, answers = moved(plugin), []
        request = threading.Thread(target=lambda answers=answers: answers.extend(engine.run(prompts)))
        request.start()
        met = meet(plugin, before, 10)
        time.sleep(rng.uniform(0, 0.01))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            rig.count(f"{victim} {signum.name}")
        rig.count("that met a load", int(met))
        request.join(300)
        rig.check(len(answers) == len(prompts), f"{victim} {signum.name}: no answer within 300 s")
        rig.equal(f"{victim} {signum.name}", want, answers)
        recover(rig, engine, prompts[2], want[2], word, pid)
    for row in engine.calls():
        longest = max(longest, row["seconds"])
    rig.show("longest call of SGLang to the backend", f"{longest:.1f} s")
    rig.check(longest <= 10 + 1 + SLACK, f"a call took {longest:.1f} s, want at most its deadline of 10 s and a second")
    rig.check(engine.number("kvport_sglang_faults_total") == 0, "exceptions were caught in the backend")
    rig.check(engine.alive(), "SGLang has ended")
    engine.stop()


def recover(rig, engine, prompt, want, word, pid):
    """Wait until a successor serves hits again."""
    end = time.monotonic() + 120
    while True:
        engine.quiet()
        engine.flush()
        got = engine.run([prompt])
        rig.equal("afterwards", [want], got)
        if got[0].cached["storage"] >= full(prompt) and process(engine, word) not in (0, pid):
            rig.count("recoveries shown by a hit")
            return
        rig.check(time.monotonic() < end, f"no hit within 120 s after {word} {pid} was ended")


class Away(Valkey):
    """A Valkey server that is not there yet."""

    def __init__(self, rig):
        self.rig, self.port, self.process = rig, free_port(), None
        self.address = f"127.0.0.1:{self.port}"

    def come(self):
        """Start it."""
        command = [str(ROOT / ".deps" / "valkey" / "valkey-server"), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                   "--dir", str(self.rig.folder), "--logfile", str(self.rig.folder / "valkey.log")]
        self.process = subprocess.Popen(command)
        self.rig.processes.append(self)
        self.rig.until(lambda: listens(self.port), "the Valkey server")

    def ask(self, *words):
        """One command."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as s:
            s.sendall((" ".join(words) + "\r\n").encode())
            return s.recv(4096).decode(errors="replace")

    def stop(self):
        """End it, also if it hangs."""
        self.process.send_signal(signal.SIGCONT)
        super().stop()

    @contextlib.contextmanager
    def hung(self, seconds=None):
        """It answers nothing until the end, or for a number of seconds."""
        self.process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, self.process.send_signal, [signal.SIGCONT]) if seconds else None
        if timer:
            timer.start()
        try:
            yield
        finally:
            if timer:
                timer.join()
            self.process.send_signal(signal.SIGCONT)


def remote(rig):
    """The setup that needs a server and nothing else: (connector, config)."""
    found = [(s, c) for s, c in stored(rig) if list(map(str, s.config.values())) == ["redis://@SERVER@"]]
    rig.check(len(found) == 1, f"{len(found)} setups need a server only")
    setup, _ = found[0]
    return setup.connector, setup.config


def store(rig):
    """A store that is away, slow, hung and full, under each policy."""
    prompts = [rig.prompts.cut("store", 300)]
    want = rig.want(prompts)
    connector, config = remote(rig)
    for policy in "wait_complete", "timeout", "best_effort":
        server = Away(rig)
        filled = json.loads(json.dumps(config).replace("@SERVER@", server.address))
        settings = {"exists_ms": 1_000, "get_ms": 3_000, "put_ms": 6_000}
        engine = SGLang(rig, policy, extra(connector, filled, settings, BREAKER), hicache_storage_prefetch_policy=policy)
        case = Case(rig, engine, policy, prompts, want)
        case.run("away")
        server.come()
        case.comes_back()
        with server.hung(4):
            case.run("slow")
        case.comes_back()
        with server.hung():
            case.run("hung")
        case.comes_back()
        server.ask("CONFIG", "SET", "maxmemory", "1")
        server.ask("FLUSHALL")
        case.run("full")
        server.ask("CONFIG", "SET", "maxmemory", "0")
        case.comes_back()
        case.judge(settings)
        engine.stop()
        server.stop()
        rig.count("policies")


class Case:
    """One engine with one policy."""

    def __init__(self, rig, engine, policy, prompts, want):
        self.rig, self.engine, self.policy, self.prompts, self.want = rig, engine, policy, prompts, want

    def flush(self):
        """Empty the caches, which SGLang refuses while a put is under way."""
        self.engine.quiet()
        self.engine.flush()

    def run(self, what):
        """Ask in trouble."""
        got = self.engine.run(self.prompts)
        self.rig.equal(f"{self.policy}, store {what}", self.want, got)
        self.rig.count("requests amid trouble")
        self.rig.notes.append(f"{self.policy}, store {what}: answered in {got[0].seconds:.1f} s, {got[0].cached['storage']} tokens from the store")

    def comes_back(self):
        """Store again, and find again. Under best_effort SGLang asks for pages, and takes them only if it must wait anyway."""
        end = time.monotonic() + 90
        while True:
            self.flush()
            got = self.engine.run(self.prompts)
            self.rig.equal(f"{self.policy}, store back", self.want, got)
            asked = self.engine.calls("batch_exists")[-1]
            if got[0].cached["storage"] > 0 or (self.policy == "best_effort" and asked["done"] > 0):
                self.rig.count("times that the store was back")
                self.flush()
                return
            self.rig.check(time.monotonic() < end, f"{self.policy}: the store is not found again: {got[0].cached}, {asked}")

    def judge(self, settings):
        """Every call ended by its deadline."""
        deadlines = {"batch_exists": settings["exists_ms"], "batch_get_v1": settings["get_ms"], "batch_set_v1": settings["put_ms"]}
        for method, ms in deadlines.items():
            rows = self.engine.calls(method)
            longest = max((r["seconds"] for r in rows), default=0.0)
            self.rig.show(f"{self.policy}: longest of {len(rows)} {method}, deadline {ms / 1000:.0f} s", f"{longest:.2f} s")
            self.rig.check(longest <= ms / 1000 + 1 + SLACK, f"{method} took {longest:.1f} s under {self.policy}")
        self.rig.check(self.engine.number("kvport_sglang_faults_total") == 0, "exceptions were caught in the backend")


PARTS = {"exists": ("batch_exists",), "get": ("batch_get_v1", "batch_get"), "put": ("batch_set_v1", "batch_set")}


def took(engine, since, part, pages):
    """Seconds of one kind of call since the log had that many rows, of at least that many keys."""
    rows = [r for r in engine.calls()[since:] if r["method"] in PARTS[part]]
    if sum(r["keys"] for r in rows) < pages:
        raise Failed(f"{engine.name}: {part} of {sum(r['keys'] for r in rows)} pages, want {pages}: {rows}")
    return sum(r["seconds"] for r in rows)


def times(rig):
    """The same prompts in turn to kvport and to SGLang's own file backend."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    prompts = {(turn, pages): rig.prompts.cut(f"time {turn} {pages}", pages * 16 + 1) for turn in range(rig.options.pairs + 1) for pages in (18, 180)}
    answers = {key: [answer] for key, answer in zip(prompts, rig.want(list(prompts.values()), tokens=1), strict=True)}
    engines = {
        "kvport": SGLang(rig, "kvport", extra(connector, config)),
        "file": SGLang(rig, "file", None, env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(rig.folder / "own")}, hicache_storage_backend="file",
                       hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 16})),
    }
    seconds = {(name, pages, part): [] for name in engines for pages in (18, 180) for part in PARTS}
    for turn in range(rig.options.pairs + 1):
        for pages in 18, 180:
            prompt = prompts[turn, pages]
            want = answers[turn, pages]
            for name, engine in engines.items():
                engine.quiet()
                engine.flush()
                since = len(engine.calls())
                rig.equal(name, want, engine.run([prompt], 1))
                engine.quiet()
                put = took(engine, since, "put", pages)
                engine.flush()
                since = len(engine.calls())
                got = engine.run([prompt], 1)
                rig.equal(name, want, got)
                check_cached(rig, name, got, [prompt], "storage")
                values = {"put": put, "get": took(engine, since, "get", pages), "exists": took(engine, since, "exists", pages)}
                if turn:  # the first warms everything up
                    for part, value in values.items():
                        seconds[name, pages, part].append(value)
    for pages in 18, 180:
        for part in PARTS:
            ours, own = (statistics.median(seconds[name, pages, part]) * 1e3 for name in engines)
            rig.show(f"{part} of {pages} pages", f"{ours:.1f} ms, SGLang's own file backend {own:.1f} ms, ratio {ours / own:.2f}")
    for engine in engines.values():
        engine.stop()
