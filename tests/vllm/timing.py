"""Lines about time. Ratios of medians of alternating runs in one run, never absolute limits of one machine alone."""

import statistics
import sys
import time

from equal import full, slug
from rig import Engine, Server, free_port, kvport, tail

from connectors import configs, line, storage

LONG = 1350
# What comes from files is copied through the kernel's page cache, which alone takes a tenth of vLLM's own hit.
MOST_ADDED = {"Offloading memory": 0.15, "SharedStorage": 0.25}
MOST_OF_LMCACHE = 1 / 3
MOST_CALLS = 120  # of hooks in a step of a model of 30 layers: vLLM makes three for each layer


def spread(values):
    """Median and quartiles in milliseconds."""
    ms = [v * 1e3 for v in values]
    q = statistics.quantiles(ms, n=4)
    return f"{statistics.median(ms):.1f} ms (quartiles {q[0]:.1f} to {q[2]:.1f}, n {len(ms)})"


def lmcache(rig, chunk):
    """An engine with LMCache's connector in multi-process mode, and its server with chunks of so many tokens."""
    folder, port = rig.options.deps / "lmcache", free_port()
    env = {"PYTHONPATH": str(folder), "LMCACHE_DISABLE_BANNER": "1"}
    # The way of transfer that works between its CPU engine and its server.
    command = [sys.executable, str(folder / "bin" / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1",
               "--http-port", str(free_port()), "--chunk-size", str(chunk), "--l1-size-gb", "1", "--eviction-policy", "LRU", "--disable-metrics",
               "--supported-transfer-mode", "lmcache_driven"]
    server = Server(rig, f"lmcache-server-{chunk}", command, port, env=dict(env), ready="")
    rig.until(lambda: "cache server is running" in tail(server.log, 200), "LMCache's server", timeout=60)
    kv = {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector", "kv_role": "kv_both",
          "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mp_transfer_mode": "lmcache_driven",
                                        "lmcache.mp.mq_timeout": 20}}
    return Engine(rig, f"lmcache-{chunk}", kv=kv, hide="llvmlite", env=dict(env))


def external(rig, label, engine, ids):
    """A hit in the connector, after vLLM's own cache was emptied."""
    engine.reset()
    before = engine.external()
    result = engine.run(ids, 8)
    hit = engine.external() - before
    rig.check(hit >= 0.9 * full([ids]), f"{label}: only {hit} tokens came from the connector")
    rig.count(f"hits of {label}")
    return result


# LMCache as it comes, and with chunks that leave no more of the prompt to compute than blocks of 32 do, which suits
# it best here: its chunks of 256 leave 70 tokens.
CHUNKS = {"LMCache": 256, "LMCache at its best": 64}


def ttft(rig):
    """vLLM's own prefix-cache hit, an external hit, LMCache's external hit, in turns."""
    ids = rig.prompts.cut("long", LONG)
    want = rig.options.baseline([ids], 8)
    engines = {"vLLM's own hit": Engine(rig, "alone")}
    for label, chunk in CHUNKS.items():
        engines[label] = lmcache(rig, chunk)
    for setup, extra in configs(rig, line("ttft")):
        engines[setup.label] = Engine(rig, "kvport-" + slug(setup.label), kv=kvport(setup.connector, extra))
    for engine in engines.values():
        rig.equal("cold", want, [engine.run(ids, 8)])
    time.sleep(2)  # LMCache acknowledges a store before it can be found
    times = {label: [] for label in engines}
    for turn in range(rig.options.pairs + 2):
        for label, engine in engines.items():
            result = engine.run(ids, 8) if label == "vLLM's own hit" else external(rig, label, engine, ids)
            rig.equal(label, want, [result])
            if turn >= 2:  # the first two warm everything up
                times[label].append(result.ttft)
    for label, engine in engines.items():
        if within := engine.metrics().get("kvport_shim_loads_in_step_total"):
            rig.show(f"{label}, loads that their step waited for", int(within))
    judge(rig, times)


def judge(rig, times):
    """Compare medians of what each adds to vLLM's own hit of the same turn."""
    own = times.pop("vLLM's own hit")
    rig.show("vLLM's own hit", spread(own))
    added = {label: statistics.median([b - a for a, b in zip(own, values)]) for label, values in times.items()}
    over = []
    for label, values in times.items():
        part, of = added[label] / statistics.median(own), added[label] / added["LMCache"]
        best = added[label] / added["LMCache at its best"]
        rig.show(label, f"{spread(values)}, adds {added[label] * 1e3:.1f} ms: {part:.1%} of vLLM's own hit, {of:.2f} of LMCache, {best:.2f} of LMCache at its best")
        if label in CHUNKS:
            continue
        over += [f"{label} adds {part:.1%}, want at most {MOST_ADDED[label]:.0%}"] if part > MOST_ADDED[label] else []
        over += [f"{label} adds {of:.2f} of what LMCache adds, want at most a third"] if of > MOST_OF_LMCACHE else []
    rig.notes += [f"over its budget: {f}" for f in over]  # times do not decide: a busy machine has its own


def steps(rig):
    """The hooks' share of decode steps: of a consumer, which has no transfers, and of an engine that saves now and then."""
    _, name, extra = storage(rig, rig.folder / "blocks")
    ids = rig.prompts.cut("steps", 300)
    for role in "kv_consumer", "kv_both":
        engine = Engine(rig, role, kv=kvport(name, extra, role=role))
        engine.run(rig.prompts.cut("warm up", 300), 8)
        engine.ask("hooks", on=True)
        engine.run(ids, 200)
        measured = [s for s in engine.ask("hooks", on=False) if s["tokens"] and s["step"] > 0.002][2:]
        added, took = [s["hooks"] for s in measured], [s["step"] for s in measured]
        p50, part = statistics.median(added), statistics.median([a / t for a, t in zip(added, took)])
        calls = statistics.median([s["calls"] for s in measured])
        rig.show(f"{role}: added to a step", f"p50 {p50 * 1e6:.0f} us, p99 {statistics.quantiles(added, n=100)[98] * 1e6:.0f} us, {part:.3%} of "
                 f"{statistics.median(took) * 1e3:.1f} ms; {calls:.0f} calls a step, n {len(measured)}")
        middle = sorted(measured, key=lambda s: s["hooks"])[len(measured) // 2]
        rig.notes.append(f"{role}, calls of the median step: " + ", ".join(f"{k} {n} ({s * 1e6:.0f} us)" for k, (n, s) in sorted(middle["names"].items())))
        if p50 > 150e-6 or part > 0.01:  # times do not decide, calls do: a busy machine has its own times
            rig.notes.append(f"over its budget: {role}: {p50 * 1e6:.0f} us and {part:.2%} of a step, want at most 150 us and 1 %")
        rig.check(calls <= MOST_CALLS, f"{role}: {calls:.0f} calls of hooks a step, want at most {MOST_CALLS}")
        rig.count("steps measured", len(measured))
        engine.stop()
