"""Lines about faults: processes that die or hang, blocks that cannot be loaded, peers that do not fit."""

import contextlib
import os
import pathlib
import random
import signal
import time

from equal import ASK, full, ticket_key
from rig import Engine, Failed, kvport

from connectors import storage, storage_plugin

# Tests kill more often than a plugin may die before it is left alone.
PATIENT = {"breaker": {"deaths": 1000, "cooldown": "1s", "backoff_min": "50ms", "backoff_max": "200ms"}}
MET = 1 << 20  # bytes that a process must have read or written for a transfer to be under way


def process(engine, word):
    """The process id of the agent or the plugin below an engine."""
    found = [p for p, command in engine.kin().items() if word in command.split(" ")[0].rpartition("/")[2] or f" {word} " in command]
    return found[-1] if found else 0


def moved(pid):
    """Bytes that a process has read and written."""
    with contextlib.suppress(OSError):
        fields = dict(line.split(": ") for line in pathlib.Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    return 0


def meet(pid, before, timeout):
    """Wait until a process is amid a transfer; whether it was met."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if moved(pid) - before > MET:
            return True
        time.sleep(0.0005)
    return False


class Store:
    """Prompts that are stored, prompts that are not, and vLLM's own answers."""

    def __init__(self, rig, engine, stored, fresh, tokens):
        self.tokens = tokens
        self.stored = rig.prompts.set("stored", stored)
        self.fresh = rig.prompts.set("fresh", fresh)
        self.want = rig.options.baseline(self.stored, tokens)
        self.want_fresh = rig.options.baseline(self.fresh, tokens)
        rig.equal("cold", self.want, engine.all(self.stored, tokens))


def kill_rounds(rig):
    """What is done in each round: (victim, signal, while loading)."""
    n = rig.options.kills
    stops, agents = max(1, n // 5), max(1, n // 6)
    rounds = [("plugin", signal.SIGSTOP if i < stops else signal.SIGKILL, i % 5 != 4) for i in range(n)]
    rounds += [("agent", signal.SIGKILL, i % 5 != 4) for i in range(agents)]
    random.Random(rig.options.seed).shuffle(rounds)
    return rounds


def kills(rig):
    """Kill and stop the plugin and kill the agent while four requests run."""
    _, name, extra = storage(rig, rig.folder / "blocks")
    engine = Engine(rig, "engine", kv=kvport(name, extra, kvport=PATIENT))
    rounds = kill_rounds(rig)
    saving = [r for r in rounds if not r[2]]
    store = Store(rig, engine, [1350, 1250, 1150, 1024], [420] * 4 * len(saving), 8)
    rng, n_fresh = random.Random(rig.options.seed), 0
    for n_round, (victim, signum, loading) in enumerate(rounds):
        if n_round % 5 == 0:
            rig.say(f"{n_round} of {len(rounds)} rounds")
        engine.reset(40)
        word = "agent" if victim == "agent" else storage_plugin()
        plugin, pid = process(engine, storage_plugin()), process(engine, word)
        rig.check(bool(plugin and pid), f"no {victim} is running: {engine.kin()}")
        before = moved(plugin)
        if loading:
            prompts, want = store.stored, store.want
        else:
            prompts, want = store.fresh[n_fresh:n_fresh + 4], store.want_fresh[n_fresh:n_fresh + 4]
            n_fresh += 4
        open_ = [engine.add(p, store.tokens) for p in prompts]
        if meet(plugin, before, 5):
            rig.count(f"{victim} {signum.name} that met a {'load' if loading else 'save'}")
        time.sleep(rng.uniform(0, 0.01))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            rig.count(f"{victim} {signum.name}")
        results = [engine.wait(rid, 60) for rid in open_]
        rig.equal(f"{victim} {signum.name}", want, results)
        recover(rig, engine, pid, word, store)
    rig.check(engine.alive(), "vLLM has ended")
    engine.settle(rig.prompts.cut("nudge", 20))
    rig.count("failed loads that vLLM was told of", engine.log.read_text(encoding="utf-8", errors="replace").count("could not be loaded"))
    met = sum(v for k, v in rig.counts.items() if "met" in k)
    rig.check(met >= 0.8 * len(rounds), f"only {met} of {len(rounds)} met a transfer")
    engine.stop()


def recover(rig, engine, pid, word, store):
    """Wait until a successor serves hits again."""
    end = time.monotonic() + 60
    while True:
        engine.reset(40)
        before = engine.external()
        got = engine.run(store.stored[3], store.tokens)
        rig.equal("afterwards", [store.want[3]], [got])
        if engine.external() > before and process(engine, word) not in (0, pid):
            rig.count("recoveries shown by a hit")
            return
        if time.monotonic() > end:
            raise Failed(f"no hit within 60 s after {word} {pid} was ended; now {engine.kin()}")
        time.sleep(0.2)


def grow(rig, engine, folder, ids, blocks):
    """Store a prompt block by block; the file of each block."""
    seen, files = set(find(folder)), []
    for i in range(blocks):
        engine.run(ids[:32 * (i + 1)], 1)
        engine.run(rig.prompts.cut("step on", 8), 1)
        new = rig.until(lambda: set(find(folder)) - seen, "a stored block")
        rig.check(len(new) == 1, f"{len(new)} files for one block")
        files += new
        seen |= new
    return files


def find(folder):
    """All block files below a folder."""
    return [p for p in pathlib.Path(folder).rglob("[0-9a-f]/[0-9a-f]/*") if p.is_file()]


def spoil(path):
    """Change some bytes amid a block, so that it is found but cannot be loaded."""
    with open(path, "r+b") as f:
        f.seek(path.stat().st_size // 2)
        old = f.read(8)
        f.seek(-8, os.SEEK_CUR)
        f.write(bytes(b ^ 0xFF for b in old))


def damage(rig):
    """Failed loads of every kind under both policies."""
    for policy in "recompute", "fail":
        folder = rig.folder / policy
        _, name, settings = storage(rig, folder)
        engine = Engine(rig, policy, kv=kvport(name, settings, policy=policy, kvport=PATIENT),
                        engine={"long_prefill_token_threshold": 16} if policy == "recompute" else {})
        cases = Damages(rig, engine, folder, policy)
        for label, indexes in ("first", [0]), ("middle", [5]), ("last", [9]), ("all", range(10)), ("first and last", [0, 9]):
            cases.one(label, indexes)
        rig.say(f"policy {policy}: single blocks done")
        cases.every_second()
        rig.say(f"policy {policy}: every second load done")
        cases.sharing()
        rig.say(f"policy {policy}: shared prefixes done")
        engine.settle(rig.prompts.cut("nudge", 20))
        rig.check(engine.alive(), "vLLM has ended")
        rig.count("loads that their step waited for", int(engine.metrics().get("kvport_shim_loads_in_step_total", 0)))
        engine.stop()


class Damages:
    """Cases of failed loads on one engine."""

    def __init__(self, rig, engine, folder, policy):
        self.rig, self.engine, self.folder, self.policy = rig, engine, folder, policy
        self.ids = rig.prompts.cut("damaged", 330)
        self.want = rig.options.baseline([self.ids], 16)
        self.files = grow(rig, engine, folder, self.ids, 10)

    def judge(self, what, want, results, hurt):
        """Every answer is vLLM's own, or, where the policy is fail, a clean error."""
        for w, got in zip(want, results):
            if self.policy == "fail" and got.finish == "error":
                self.rig.check(list(got.ids) == list(w.ids)[:len(got.ids)], f"{what}: wrong tokens before the error: {got.ids}")
                self.rig.count("clean errors under policy fail")
            else:
                self.rig.equal(f"{what}, policy {self.policy}", [w], [got])
        errors = sum(r.finish == "error" for r in results)
        self.rig.check(self.policy == "recompute" or errors >= hurt, f"{what}: {errors} errors under policy fail, want {hurt}")

    def failures(self):
        """Failed loads that vLLM was told of until now."""
        return self.engine.log.read_text(encoding="utf-8", errors="replace").count("could not be loaded")

    def run(self, what, prompts, want, hurt, tokens=16):
        """Run prompts together and expect at least so many failed loads."""
        self.engine.reset()
        before = self.failures()
        open_ = [self.engine.add(p, tokens) for p in prompts]
        results = [self.engine.wait(rid, 90) for rid in open_]
        failed = self.failures() - before
        self.rig.check(failed >= hurt, f"{what}, policy {self.policy}: {failed} loads failed, want {hurt}")
        self.rig.count(f"failed loads, policy {self.policy}", failed)
        self.judge(what, want, results, hurt)

    def repair(self, prompts, want):
        """Store again what was damaged, and show that it is a hit then."""
        end = time.monotonic() + 60
        while True:
            self.engine.reset()
            before = self.engine.external()
            open_ = [self.engine.add(p, 16) for p in prompts]
            for w, rid in zip(want, open_):
                self.judge("repair", [w], [self.engine.wait(rid, 90)], 0)
            if self.engine.external() - before >= full(prompts):
                return
            self.rig.check(time.monotonic() < end, "damaged blocks are not stored again")

    def one(self, label, indexes):
        """Damage some blocks of one prompt."""
        for i in indexes:
            spoil(self.files[i])
        self.run(label, [self.ids], self.want, 1)
        self.rig.count("kinds of damage")
        self.repair([self.ids], self.want)

    def every_second(self):
        """Eight prompts, every second of which has a damaged block."""
        prompts = self.rig.prompts.set("every second", [200] * 8)
        want = self.rig.options.baseline(prompts, 16)
        files = []
        for p in prompts:
            seen = set(find(self.folder))
            self.engine.run(p, 1)
            self.engine.run(self.rig.prompts.cut("step on", 8), 1)
            self.rig.until(lambda seen=seen: len(set(find(self.folder)) - seen) >= 6, "stored blocks")
            files.append(sorted(set(find(self.folder)) - seen))
        for i in range(0, 8, 2):
            spoil(files[i][0])
        self.run("every second", prompts, want, 4)
        self.rig.count("kinds of damage")

    def sharing(self):
        """Two equal prompts and one with the same prefix, together, with block 1 of 4 damaged; recompute goes in chunks of 16."""
        base = self.ids[:140]
        other = self.ids[:100] + self.rig.prompts.cut("sharing", 40)
        want = self.rig.options.baseline([base, base, other], 16)
        for i in range(3):
            spoil(self.files[1])
            self.run(f"shared prefix {i}", [base, base, other], want, 1)
            self.repair([base], want[:1])
        self.rig.count("kinds of damage")


def other_isa():
    """A kernel that this machine can run in bfloat16 and would not choose."""
    import torch

    return "vec" if torch.cpu._is_amx_tile_supported() else "vec16"


def isa(rig):
    """A prefill engine with the kernel for other processors hands over to one with this one's."""
    _, name, extra = storage(rig, rig.folder / "blocks")
    half, other = {"dtype": "bfloat16"}, other_isa()
    ids = rig.prompts.set("isa", [300, 600, 900])
    want = rig.options.baseline(ids, 16, engine=half)
    key = {"ticket_key_file": ticket_key(rig)}
    p = Engine(rig, "p", kv=kvport(name, extra, role="kv_producer", kvport=key), engine=half, isa=other)
    handed = [p.run(x, 1, kvp=ASK) for x in ids]
    rig.check(all(h.kvp and h.kvp.get("kvport_ticket") for h in handed), "no ticket")
    stored = rig.until(lambda: len(find(rig.folder / "blocks")), "stored blocks")
    rig.show("blocks that P stored", stored)
    d = Engine(rig, "d", kv=kvport(name, extra, role="kv_consumer", kvport=key), engine=half)
    got = [d.run(x, 16, kvp=h.kvp) for x, h in zip(ids, handed)]
    rig.equal("another ISA", want, got)
    rig.check(d.external() == 0, f"{d.external()} tokens of a foreign layout were loaded")
    refused = rig.until(lambda: {k: v for k, v in d.metrics().items() if "tickets_refused" in k and v > 0}, "a counted refusal", 5)
    rig.show("refused", refused)
    lines = [line for line in d.log.read_text(encoding="utf-8", errors="replace").splitlines() if "ticket" in line and "refus" in line]
    rig.check(bool(lines), "the log does not say why")
    rig.notes.append(lines[0][-300:])
    d.stop()
    # The same two with equal kernels, which shows that it was the kernel.
    d = Engine(rig, "d-equal", kv=kvport(name, extra, role="kv_consumer", kvport=key), engine=half, isa=other)
    d.run(ids[0], 16, kvp=p.run(ids[0], 1, kvp=ASK).kvp)
    rig.check(d.external() >= 256, "engines with equal kernels do not share either")
    rig.count("tokens between engines with equal kernels", d.external())
