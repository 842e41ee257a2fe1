"""Lines about stores that fail, processes that die, and time."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from connectors import Valkey, line
from connectors import setups as every
from faults import PATIENT as BREAKER
from faults import process
from relay import FROM_SERVER, TO_SERVER, Relay
from rig import Failed
from served import PAGE, PATIENT, SGLang, check_cached, extra, full

GRACE = 1.0  # seconds after its deadline by which a call has certainly ended
SLACK = 2.0  # seconds for what the lateness of sleeps does not show: other processes of the engine wait for a processor, too
POLICIES = ["wait_complete", "timeout", "best_effort"]
METHODS = {"exists": ("batch_exists",), "get": ("batch_get_v1", "batch_get"), "put": ("batch_set_v1", "batch_set")}


def in_time(rig, engine, settings, asked=tuple(METHODS)):
    """Check that every call has ended by its deadline, that there were some of the kinds that are asked, and show the longest of each kind."""
    engine.check_calls()
    for kind, methods in METHODS.items():
        deadline, rows = settings[f"{kind}_ms"] / 1000, engine.calls(*methods)
        rig.check(rows or kind not in asked, f"{engine.name}: SGLang has never called {kind}")
        longest = max((r["seconds"] for r in rows), default=0.0)
        rig.show(f"{engine.name}: longest of {len(rows)} {kind}, deadline {deadline:.0f} s", f"{longest:.2f} s")
        late = [r for r in rows if r["seconds"] > deadline + GRACE + SLACK + r["late"]]
        rig.check(not late, f"{engine.name}: {kind} ended after its deadline of {deadline:.0f} s: {late}")


def rounds(rig, policy):
    """What is done in each round under a policy, less under others than the first: (victim, signal, amid which kind of call)."""
    n = rig.options.kills if policy == rig.options.policies[0] else max(2, rig.options.kills // 5)
    kinds = ("put", "put") if policy == "best_effort" else ("get", "put")  # on an idle engine it gets nothing
    out = [("plugin", signal.SIGSTOP if i % 5 == 1 else signal.SIGKILL, kinds[i % 2]) for i in range(n)]
    out += [("agent", signal.SIGKILL, kinds[i % 2]) for i in range(max(1, n * 3 // 20))]
    random.Random(rig.options.seed).shuffle(out)
    return out


class Kills:
    """One engine whose store is behind a relay, which holds a transfer until the process that does it was struck."""

    SETTINGS = {"exists_ms": 9_000, "get_ms": 10_000, "put_ms": 10_000}
    AMID = 1 << 19  # bytes after which a transfer is held: less than a page, so none of its pages is over
    DIRECTION = {"get": FROM_SERVER, "put": TO_SERVER}

    def __init__(self, rig, policy):
        self.rig, self.policy, self.landed = rig, policy, 0
        server = Valkey(rig, rig.folder / f"valkey-{policy}")
        self.relay = Relay(server.address)
        self.relay.come()
        connector, config, self.plugin = remote(self.relay.address)
        # Under timeout, SGLang would make no get where a busy machine is late with the question.
        kept = extra(connector, config, self.SETTINGS, BREAKER, prefetch_timeout_base=60)
        self.engine = SGLang(rig, policy, kept, hicache_storage_prefetch_policy=policy)

    def strike(self, prompts, want, victim, signum, kind):
        """Answer prompts, and strike a process amid a get or put of theirs; the process id of who was struck."""
        word = "agent" if victim == "agent" else self.plugin
        self.rig.check(pid := process(self.engine, word), f"no {victim} is running: {self.engine.kin()}")
        since = len(self.engine.rows())
        with ThreadPoolExecutor(1) as thread:
            with self.relay.hung(self.DIRECTION[kind], self.AMID):
                answers = thread.submit(self.engine.run, prompts, timeout=300)
                self.rig.check(self.relay.held(120), f"{victim} {signum.name}: no {kind} has moved {self.AMID} bytes")
                struck = time.monotonic()
                os.kill(pid, signum)
            self.rig.equal(f"{victim} {signum.name} amid a {kind}", want, answers.result())
        self.engine.settle()
        within = [r for r in ended(self.engine, since, kind) if r["begun"] <= struck <= r["begun"] + r["seconds"]]
        self.landed += bool(within)
        self.rig.count(f"{victim} {signum.name}")
        self.rig.count(f"landed within a {kind}", int(bool(within)))
        self.rig.count("of those, calls whose pages did not all come through", int(any(r["done"] < r["keys"] for r in within)))
        return word, pid

    def recover(self, prompt, want, word, pid):
        """Wait until a successor serves hits again."""
        end = time.monotonic() + 120
        while True:
            self.engine.flush()
            since = len(self.engine.rows())
            got = self.engine.run([prompt])
            self.rig.equal("afterwards", [want], got)
            self.engine.settle()
            served = got[0].cached["storage"] >= full(prompt) or succeed(self.policy, self.engine, since, full(prompt) // PAGE)
            if served and process(self.engine, word) not in (0, pid):
                self.rig.count("recoveries shown by a hit" if self.policy != "best_effort" else "recoveries shown by pages that are found or stored")
                return
            self.rig.check(time.monotonic() < end, f"no hit within 120 s after {word} {pid} was ended")


def kills(rig):
    """Kill and stop the plugin and kill the agent amid gets and puts, under each policy that is asked for."""
    for policy in rig.options.policies:
        killed(rig, policy)


def killed(rig, policy):
    """The same under one policy."""
    todo = rounds(rig, policy)
    prompts = rig.prompts.set("killed", [500, 300])
    fresh = [rig.prompts.cut(f"stored amid a kill {at}", 200) for at in range(len(todo))]
    answers = rig.want([*prompts, *fresh])  # all at once
    want, want_fresh = answers[:len(prompts)], answers[len(prompts):]
    k = Kills(rig, policy)
    engine = k.engine
    rig.equal("cold", want, engine.run(prompts))
    for at, (victim, signum, kind) in enumerate(todo):
        if at % 5 == 0:
            rig.say(f"{policy}: {at} of {len(todo)} rounds")
        engine.flush()
        mine, theirs = ([fresh[at]], [want_fresh[at]]) if kind == "put" else (prompts, want)
        word, pid = k.strike(mine, theirs, victim, signum, kind)
        k.recover(prompts[1], want[1], word, pid)
    rig.check(engine.alive(), "SGLang has ended")
    agents = sum(victim == "agent" for victim, _, _ in todo)
    rig.check(k.landed == len(todo), f"{policy}: only {k.landed} of {len(todo)} landed within a transfer")
    rig.check((lost := engine.number("kvport_sglang_agents_lost_total")) == agents, f"{lost} agents have ended, {agents} were killed")
    failed = sum(engine.number(f"kvport_sglang_{kind}_{how}_pages_total") for kind in ("get", "put") for how in ("failed", "unanswered", "late"))
    rig.check(failed > 0, "no page of a get or put has failed")
    rig.count("pages of gets and puts that failed", failed)
    in_time(rig, engine, k.SETTINGS, ("exists", "put") if policy == "best_effort" else tuple(METHODS))
    engine.stop()
    k.relay.stop()


def ended(engine, since, kind):
    """The calls of a kind that have ended since the log had so many rows."""
    return [r for r in engine.rows()[since:] if "seconds" in r and r["method"] in METHODS[kind]]


def succeed(policy, engine, since, pages):
    """Whether so many pages were found and loaded under a policy that may not wait for them: timeout, when the machine is busy. Under best_effort
    SGLang takes pages only if it must wait anyway, and an idle engine may not even ask: there it is enough that they are found or stored."""
    most = {kind: max((r["done"] for r in ended(engine, since, kind)), default=0) for kind in METHODS}
    if policy == "best_effort":
        return max(most["exists"], most["put"]) >= pages
    return policy == "timeout" and most["get"] >= pages


def remote(connected):
    """The connector, its config and its plugin that need a server and nothing else, with that server's address."""
    found = [s for s in every()[0] if line("sglang")(s) and re.findall("@[A-Z]+@", json.dumps(s.config)) == ["@SERVER@"]]
    if len(found) != 1:
        raise Failed(f"{len(found)} setups need a server only")
    return found[0].connector, json.loads(json.dumps(found[0].config).replace("@SERVER@", connected)), found[0].plugin


def store(rig):
    """A store that is away, slow, hung and full, under each policy that is asked for."""
    rig.want([p for policy in rig.options.policies for p in Case.all_prompts(rig, policy)[:3]])  # of first tries, all at once
    for policy in rig.options.policies:
        case = Case(rig, policy)
        case.away()
        case.slow()
        case.hung_put()
        case.hung()
        case.full()
        if policy != "best_effort":  # which gets nothing while the engine is idle
            case.hung_get()
        # Under best_effort an idle engine asks what is there, and loads nothing.
        in_time(rig, case.engine, case.settings, ("exists", "put") if policy == "best_effort" else tuple(METHODS))
        if policy == "best_effort":
            case.found()
        case.engine.stop()
        case.relay.stop()
        rig.count(f"times that {policy} held")


class Case:
    """One engine with one policy, and its store."""

    LONG = {"exists_ms": 9_000, "get_ms": 15_000, "put_ms": 15_000}
    SHORT = {"exists_ms": 6_000, "get_ms": 10_000, "put_ms": 10_000}  # without --all
    AMID = 1 << 19  # bytes after which a transfer is under way, and no page of it is over
    SLOWER = 3  # times as long as before may a busy machine take to compute
    TRIES = 3

    def __init__(self, rig, policy):
        self.rig, self.policy, self.settings = rig, policy, self.LONG if rig.options.all else self.SHORT
        self.late = 4.0 if rig.options.all else 2.0  # seconds by which a slow store answers late: two such answers come before each deadline
        self.server = Valkey(rig, rig.folder / f"valkey-{policy}")
        self.relay = Relay(self.server.address)
        connector, config, _ = remote(self.relay.address)
        config["timeout_ms"] = 60_000  # of the connector: the deadlines that count here are those of this package
        self.warm, self.prompt, *self.fresh = self.all_prompts(rig, policy)
        self.pages = full(self.prompt) // PAGE
        self.kept = extra(connector, config, self.settings, {**PATIENT, **BREAKER})
        self.engine = SGLang(rig, policy, self.kept, hicache_storage_prefetch_policy=policy)
        self.alone, self.since, self.held = 0.0, 0, True

    @classmethod
    def all_prompts(cls, rig, policy):
        """What is asked under a policy: the first prompt, the one that is asked again and again, and for each try one that is stored while the store hangs."""
        return [rig.prompts.cut("warm", 40), rig.prompts.cut("store", 300), *(rig.prompts.cut(f"put {policy} {at}", 300) for at in range(cls.TRIES))]

    def waits(self):
        """Seconds that a request may wait for the store: SGLang's policy and our deadlines."""
        exists, get = self.settings["exists_ms"] / 1000 + GRACE, self.settings["get_ms"] / 1000 + GRACE
        # Under timeout SGLang's own time is 1 s and 0.25 s for each 1,024 tokens.
        return {"wait_complete": exists + get, "timeout": exists + 1.25, "best_effort": 0.0}[self.policy]

    def ask(self, what, trouble, met=("put",), prompts=()):
        """Ask amid trouble, and wait until everything has ended that this began; give the answer.

        On a busy machine a try may show nothing: SGLang gave up before it made the calls that are looked at, those of met, or a neighbour had the
        processors, and the answer took longer than it may wait for the store. Then the store comes back, and it is asked again, amid new trouble.
        """
        took = []
        while len(took) < self.TRIES:
            if took:
                self.comes_back()
            prompt = prompts[len(took)] if prompts else self.prompt
            self.since, self.held = len(self.engine.rows()), True
            with trouble():
                got = self.engine.run([prompt])
                self.rig.equal(f"{self.policy}, store {what}", self.rig.want([prompt]), got)
                self.engine.flush()
                self.engine.settle()
            self.rig.count("requests amid trouble")
            self.rig.notes.append(f"{self.policy}, store {what}: answered in {got[0].seconds:.1f} s, {got[0].cached['storage']} tokens from the store")
            most = self.SLOWER * self.alone + self.waits() + SLACK + got[0].late
            missed = [kind for kind in met if not self.ended(kind)] + ([] if self.held else ["a transfer that hung"])
            if not missed and (not self.alone or got[0].seconds <= most):
                return got[0]
            took.append(f"{got[0].seconds:.1f} of at most {most:.1f} s" + (f", without {' and '.join(missed)}" if missed else ""))
        self.rig.check(False, f"{self.policy}, store {what}: {'; '.join(took)}")

    @contextlib.contextmanager
    def hangs(self, direction=FROM_SERVER, after=0):
        """Have the store hang once so many bytes have gone in one direction; held is whether it came to that."""
        with self.relay.hung(direction, after):
            yield
            self.held = self.relay.hangs

    @contextlib.contextmanager
    def is_full(self):
        """Have the store be empty, and refuse everything."""
        self.order("CONFIG SET maxmemory 1")
        self.order("FLUSHALL")
        try:
            yield
        finally:
            self.order("CONFIG SET maxmemory 0")

    def ended(self, kind):
        """The calls of a kind that have ended since the last request began."""
        return ended(self.engine, self.since, kind)

    def check(self, what, kind, right):
        """Check every call of a kind since the last request began."""
        rows = self.ended(kind)
        wrong = [r for r in rows if not right(r)]
        self.rig.check(not wrong, f"{self.policy}, store {what}: {kind} gave {wrong}")
        self.rig.count(f"calls that met a store that is {what}", len(rows))

    def asks(self, *more):
        """The kinds of calls that each request must lead to; under best_effort an idle engine may ask for no page."""
        return more if self.policy == "best_effort" else ("exists", *more)

    def counted(self, *names):
        """The sum of some numbers of the backend's."""
        return sum(self.engine.number(f"kvport_sglang_{name}_total") for name in names)

    def given_up(self, kind):
        """The pages of a kind of call that are counted as not done."""
        return self.counted(*(f"{kind}_{how}_pages" for how in ("late", "failed", "unanswered")))

    def away(self):
        """Nobody listens, from the start on; then the store comes."""
        self.rig.equal("the first", self.rig.want([self.warm]), self.engine.run([self.warm]))
        seconds = []
        for _ in range(2):
            seconds.append(self.ask("away", contextlib.nullcontext, self.asks("put")).seconds)
            self.check("away", "exists", lambda r: r["done"] == 0)
            self.check("away", "put", lambda r: r["done"] == 0)
        self.alone = max(seconds)
        self.relay.come()
        self.comes_back()

    def slow(self):
        """Every answer comes 4 s late, which is before the deadlines: pages are found, and come."""
        waits = self.policy == "wait_complete"
        got = self.ask("slow", lambda: self.relay.slow(self.late), self.asks("get") if waits else self.asks())
        self.check("slow", "exists", lambda r: r["seconds"] >= self.late and r["done"] == self.pages)
        if waits:
            self.check("slow", "get", lambda r: r["seconds"] >= self.late and r["done"] == self.pages)
            self.rig.check(got.cached["storage"] == full(self.prompt), f"a slow store gave {got.cached}")
        self.comes_back()

    def hung_get(self):
        """It hangs once a part of the pages has come."""
        before = self.given_up("get")
        self.ask("hung amid a get", lambda: self.hangs(FROM_SERVER, self.AMID), self.asks("get"))
        self.check("hung amid a get", "exists", lambda r: r["done"] == self.pages)
        self.check("hung amid a get", "get", lambda r: r["done"] < self.pages and r["seconds"] >= 0.9 * self.settings["get_ms"] / 1000)
        self.rig.check(self.given_up("get") > before, "no page of a get is counted as late or failed")
        if self.rig.options.all:  # its pages are hidden for a minute
            self.comes_back()

    def hung_put(self):
        """It hangs once a part of other pages has gone."""
        before = self.given_up("put")
        self.ask("hung amid a put", lambda: self.hangs(TO_SERVER, self.AMID), prompts=self.fresh)
        self.check("hung amid a put", "put", lambda r: r["done"] == 0)
        longest = max(r["seconds"] for r in self.ended("put"))
        self.rig.check(longest >= 0.9 * self.settings["put_ms"] / 1000, f"no put came to its deadline: the longest took {longest:.1f} s")
        self.rig.check(self.given_up("put") > before, "no page of a put is counted as late or failed")
        self.comes_back()

    def hung(self):
        """It answers nothing."""
        before = self.counted("exists_late", "exists_unanswered")
        self.ask("hung", self.hangs, self.asks("put"))
        self.check("hung", "exists", lambda r: r["done"] == 0)
        self.check("hung", "put", lambda r: r["done"] == 0)
        if asked := self.ended("exists"):
            longest = max(r["seconds"] for r in asked)
            self.rig.check(longest >= 0.9 * self.settings["exists_ms"] / 1000, f"no question came to its deadline: the longest took {longest:.1f} s")
            self.rig.check(self.counted("exists_late", "exists_unanswered") > before, "no question is counted as late")
        self.comes_back()

    def full(self):
        """It is empty and refuses everything."""
        self.ask("full", self.is_full, self.asks("put"))
        self.check("full", "exists", lambda r: r["done"] == 0)
        self.check("full", "put", lambda r: r["done"] == 0)
        self.comes_back()

    def found(self):
        """What SGLang was told is stored is there: an engine that waits for it finds it."""
        other = SGLang(self.rig, f"{self.policy}-other", self.kept)
        got = other.run([self.prompt])
        self.rig.equal("an engine that waits", self.rig.want([self.prompt]), got)
        check_cached(self.rig, "an engine that waits", got, [self.prompt], "storage")
        other.stop()

    def order(self, words):
        """Have the server do something, past the relay."""
        host, port = self.server.address.split(":")
        with socket.create_connection((host, int(port)), 10) as s:
            s.sendall((words + "\r\n").encode())
            answer = s.recv(4096)
        self.rig.check(answer == b"+OK\r\n", f"{words}: the server answers {answer!r}")

    def comes_back(self):
        """Store again, and find again."""
        end = time.monotonic() + 180
        while True:
            self.since = len(self.engine.rows())
            got = self.engine.run([self.prompt])
            self.rig.equal(f"{self.policy}, store back", self.rig.want([self.prompt]), got)
            self.engine.flush()
            self.engine.settle()
            if got[0].cached["storage"] == full(self.prompt) or succeed(self.policy, self.engine, self.since, self.pages):
                self.rig.count("times that the store was back")
                return
            done = {kind: [r["done"] for r in self.ended(kind)] for kind in METHODS}
            self.rig.check(time.monotonic() < end, f"{self.policy}: the store is not found again: {got[0].cached}, calls gave {done}")


def took(engine, since, part, pages):
    """Seconds of one kind of call since the log had that many rows, of at least that many keys."""
    rows = [r for r in engine.calls()[since:] if r["method"] in METHODS[part]]
    if sum(r["keys"] for r in rows) < pages:
        raise Failed(f"{engine.name}: {part} of {sum(r['keys'] for r in rows)} pages, want {pages}: {rows}")
    return sum(r["seconds"] for r in rows)


def times(rig):
    """The same prompts in turn to kvport and to SGLang's own file backend."""
    prompts = {(turn, pages): rig.prompts.cut(f"time {turn} {pages}", pages * PAGE + 1) for turn in range(rig.options.pairs + 1) for pages in (18, 180)}
    answers = {key: [answer] for key, answer in zip(prompts, rig.want(list(prompts.values()), tokens=1), strict=True)}
    engines = dict(zip(("kvport", "file"), rig.options.shared.both(rig), strict=True))
    seconds = {(name, pages, part): [] for name in engines for pages in (18, 180) for part in METHODS}
    for turn in range(rig.options.pairs + 1):
        for pages in 18, 180:
            prompt = prompts[turn, pages]
            want = answers[turn, pages]
            for name in sorted(engines, reverse=turn % 2 == 0):  # each is the first one as often
                engine = engines[name]
                engine.flush()
                since = len(engine.calls())
                rig.equal(name, want, engine.run([prompt], 1))
                engine.flush()  # once everything is stored
                put = took(engine, since, "put", pages)
                since = len(engine.calls())
                got = engine.run([prompt], 1)
                rig.equal(name, want, got)
                check_cached(rig, name, got, [prompt], "storage")
                values = {"put": put, "get": took(engine, since, "get", pages), "exists": took(engine, since, "exists", pages)}
                if turn:  # the first warms everything up
                    for part, value in values.items():
                        seconds[name, pages, part].append(value)
    for pages in 18, 180:
        for part in METHODS:
            ours, own = (sorted(s * 1e3 for s in seconds[name, pages, part]) for name in ("kvport", "file"))
            ratio = statistics.median(ours) / statistics.median(own)
            rig.show(f"{part} of {pages} pages", f"{spread(ours)}, SGLang's own file backend {spread(own)}, ratio {ratio:.2f}")
    for engine in engines.values():
        engine.check_calls()


def spread(values):
    """The median with the least and the most."""
    return f"{statistics.median(values):.1f} ms ({values[0]:.1f} to {values[-1]:.1f})"
