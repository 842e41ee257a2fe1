"""Lines about few blocks, aborts and ranks."""

import random
import time

from equal import full
from faults import PATIENT, meet, moved, process
from rig import Engine, kvport, serve

from connectors import storage, storage_plugin


def pressure(rig):
    """66 blocks: preemptions, aborts at random times and of requests that load; afterwards every block is free."""
    _, name, extra = storage(rig, rig.folder / "blocks")
    few = {"num_gpu_blocks_override": 66}
    engine = Engine(rig, "engine", kv=kvport(name, extra, kvport=PATIENT), engine=few)
    nudge = rig.prompts.cut("nudge", 20)
    growing = rig.prompts.set("growing", [480, 470, 460, 450])
    want = rig.options.baseline(growing, 100)
    for round_ in range(3):
        rig.equal(f"preemptions {round_}", want, engine.all(growing, 100, together=4))
        engine.settle(nudge)
        engine.reset()
    preempted = int(engine.metrics().get("vllm:num_preemptions_total", 0))
    rig.check(preempted > 0, "nothing was preempted")
    rig.count("preemptions", preempted)
    rig.say(f"{preempted} preemptions")
    storm(rig, engine, growing, want)
    rig.say("abort storm over")
    loading(rig, engine)
    pool = engine.settle(nudge)
    rig.show("afterwards", f"{pool['free']} of {pool['blocks'] - 1} blocks free, {pool['refs']} references, {pool['requests']} requests")
    rig.count("external tokens", engine.external())
    rig.check(engine.external() > 1000, "hardly anything came from the connector")
    engine.stop()


def storm(rig, engine, prompts, want):
    """Aborts at random times of requests that wait, load, prefill and run."""
    rng = random.Random(rig.options.seed)
    for _ in range(10):
        engine.reset()
        open_ = [engine.add(prompts[i % 4], 40) for i in range(6)]
        for rid in rng.sample(open_, 5):
            time.sleep(rng.expovariate(20))
            engine.tell(op="abort", id=rid)
            engine.answer("aborted")
            open_.remove(rid)
            rig.count("aborts")
        engine.wait(open_[0])
        engine.settle(prompts[0][:20])
    rig.equal("after the storm", [want[1]], [engine.run(prompts[1], 100)])


def loading(rig, engine):
    """Aborts of requests whose load is under way."""
    ids = rig.prompts.cut("aborted load", 1350)
    want = rig.options.baseline([ids], 8)
    rig.equal("cold", want, [engine.run(ids, 8)])
    plugin = process(engine, storage_plugin())
    for _ in range(10):
        engine.reset()
        beside = engine.add(ids[:40], 400)  # a request that runs alone may load within its step, and cannot be aborted there
        before = moved(plugin)
        rid = engine.add(ids, 8)
        met = meet(plugin, before, 2)
        for one in rid, beside:
            engine.tell(op="abort", id=one)
            engine.answer("aborted")
        rig.count("aborts while loading", int(met))
        engine.settle(ids[:20])
    engine.reset()
    before = engine.external()
    rig.equal("after aborted loads", want, [engine.run(ids, 8)])
    rig.check(engine.external() - before >= 0.9 * full([ids]), "no hit after aborted loads")
    rig.check(rig.counts["aborts while loading"] > 0, "no abort met a load")


def ranks(rig):
    """Tensor parallelism over three ranks, each with a region of its own (the model has 9 heads, so not two)."""
    _, name, extra = storage(rig, rig.folder / "blocks")
    ids = rig.prompts.set("ranks", [300, 600, 900])
    parallel = ["--tensor-parallel-size", "3"]
    alone = serve(rig, "alone", args=parallel)
    want = alone.all(ids, 16)
    alone.stop()
    server = serve(rig, "ranks", kv=kvport(name, extra), args=parallel)
    rig.equal("three ranks, cold", want, server.all(ids, 16))
    server.reset()  # once all is saved
    server.stop()
    server = serve(rig, "ranks-later", kv=kvport(name, extra), args=parallel)
    rig.equal("three ranks, warm", want, server.all(ids, 16))
    rig.check(server.external() >= 0.9 * full(ids), f"only {server.external()} tokens came from the connector")
    rig.count("external tokens", server.external())
    rig.count("ranks", 3)
    server.stop()
