"""The line about loads whose layers vLLM's attention waits for one by one."""

import os
import pathlib
import subprocess
import time

from equal import ASK, UNHURRIED, slug, ticket_key
from rig import ROOT, Engine, kvport
from timing import spread

from connectors import configs, line

TOKENS = 16
# Short enough to be loaded within a step on a busy machine too: a load that promises to take longer is not.
LENGTHS = [100, 160, 220, 280]
ENOUGH = 8  # loads of which a layer was used before their end
ROUNDS = 60
USED_EARLY = "kvport_shim_loads_by_layer_total"
IN_STEP = "kvport_shim_loads_in_step_total"
OFF = "kvport_shim_load_by_layer_off_total"


def layers(rig):
    """Connectors that bring layers give vLLM's own tokens, with and without waiting for layers; then a layer is damaged."""
    prompts = rig.prompts.set("layers", LENGTHS)
    want = rig.options.baseline(prompts, TOKENS)
    for setup, extra in configs(rig, line("layers")):
        settings = {"ticket_key_file": ticket_key(rig), **UNHURRIED}
        p = Engine(rig, slug(setup.label) + "-p", kv=kvport(setup.connector, extra, role="kv_producer", kvport=settings))
        for by_layer in False, True:
            config = kvport(setup.connector, extra, role="kv_consumer", kvport={**settings, "load_by_layer": by_layer})
            d = Engine(rig, f"{slug(setup.label)}-d-{by_layer}", kv=config)
            label = f"{setup.label}, {'layer by layer' if by_layer else 'as a whole'}"
            times = hand_over(rig, label, p, d, prompts, want, ENOUGH if by_layer else 0)
            rig.show(f"{label}: TTFT of a hit of {LENGTHS[-1]} tokens", spread(times))
            rig.check(not d.metrics().get(OFF), f"{label}: vLLM does not wait for layers")
            rig.check(not d.metrics().get("kvport_shim_loads_failed_total"), f"{label}: loads failed")
            d.stop()
        p.stop()
        rig.say(f"{setup.label} done")
    damaged(rig, prompts, want)


def used_early(d):
    """Loads of which a layer was used before their end, until now."""
    return int(d.metrics().get(USED_EARLY, 0))


def hand_over(rig, label, p, d, prompts, want, enough, before=lambda: None, after=lambda: None):
    """Hand prompts over until enough loads were used early; the times to the first token of the longest prompt."""
    times, began = [], time.monotonic()
    for n in range(ROUNDS):
        for ids, w in zip(prompts, want):
            handed = p.run(ids, 1, kvp=ASK)
            rig.check(bool(handed.kvp and handed.kvp.get("kvport_ticket")), f"{label}: no ticket in {handed.kvp}")
            d.reset()
            before()
            rid = d.add(ids, TOKENS, kvp=handed.kvp)
            after()
            result = d.wait(rid)
            rig.equal(label, [w], [result])
            if ids is prompts[-1]:
                times.append(result.ttft)
        if n >= ENOUGH and used_early(d) >= enough:
            break
    early = used_early(d)
    rig.check(early >= enough and (early > 0) == (enough > 0), f"{label}: {early} loads were used before their end, want {enough}")
    rig.count(f"{label}: loads", len(prompts) * len(times))
    rig.count(f"{label}: loads within their step", int(d.metrics().get(IN_STEP, 0)))
    rig.count(f"{label}: loads of which a layer was used before their end", early)
    rig.count("tokens from the connector", d.external())
    rig.say(f"{label}: {time.monotonic() - began:.0f} s for {len(times)} rounds")
    return times


def damaged(rig, prompts, want):
    """The second layer of each load by layers is damaged, and comes when attention has used the first one."""
    plugins, gate = rig.folder / "plugins", pathlib.Path(rig.options.scratch) / "gate"
    plugins.mkdir()
    subprocess.run([os.environ.get("GO", "go"), "build", "-o", str(plugins / "kvport-hold"), "./engine/testdata/plugin"], cwd=ROOT, check=True)
    env, extra = {"KVPORT_PLUGIN_PATH": str(plugins)}, {"dir": rig.options.scratch, "gate": str(gate), "fault": "damage"}
    settings = {"ticket_key_file": ticket_key(rig), **UNHURRIED}
    p = Engine(rig, "damage-p", kv=kvport("HoldConnector", extra, role="kv_producer", engine_id="p", kvport=settings), env=dict(env))
    config = kvport("HoldConnector", extra, role="kv_consumer", engine_id="d", kvport={**settings, "load_by_layer": True})
    d = Engine(rig, "damage-d", kv=config, env=dict(env))

    def open_late():
        time.sleep(0.3)  # attention of the first layer runs meanwhile
        gate.touch()

    hand_over(rig, "a damaged second layer", p, d, prompts[:2], want[:2], ENOUGH, lambda: gate.unlink(missing_ok=True), open_late)
    failed = d.log.read_text(encoding="utf-8", errors="replace").count("could not be loaded")
    rig.check(failed >= ENOUGH, f"{failed} loads failed, want {ENOUGH}")
    rig.count("damaged loads that vLLM computed again", failed)
    rig.check(d.alive(), "vLLM has ended")
    p.stop()
    d.stop()
