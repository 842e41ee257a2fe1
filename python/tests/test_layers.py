"""Loads whose layers are waited for one by one, from a plugin that brings them so: no second layer before a gate is there."""

import os
import signal
import time
import types

import pytest
from engine import BLOCK_TOKENS, LAYER_BYTES, Engine, content, request
from test_agent import LIMIT, compute, finish, idle, keys, lookup, park, stored, until

from kvport_agent.link import State
from kvport_vllm.worker import WorkerSide

N = 3  # blocks of a prompt
BLOCKS = [21, 22, 23, 24]  # of the request that loads: the last one is for what it computes
HOUR = 3600.0


@pytest.fixture
def start(here, layered, monkeypatch):
    """Start an engine whose plugin has a fault, or none."""
    monkeypatch.setenv("KVPORT_PLUGIN_PATH", str(layered))
    monkeypatch.setattr("kvport_vllm.worker._WAIT_AT_MOST", LIMIT)
    engines = []

    def start_(fault="", **more):
        extra = {"dir": str(here), "gate": str(here / "gate"), "fault": fault}
        inner = {"kv_connector": "HoldConnector", "kv_connector_extra_config": extra, "kvport": {"load_by_layer": True}, **more}
        engine = Engine(here / "store", waits=True, **inner)
        monkeypatch.setattr(engine.scheduler.scheduler.pace, "quick", lambda blocks: True)
        engines.append(engine)
        return engine

    yield start_
    for engine in engines:
        engine.close()


def handed(engine, tag):
    """Hold the blocks of a prompt, and give a request that may load them within its step."""
    first = request(f"{tag}-held", keys(N), N * BLOCK_TOKENS + 1, kv_transfer_params={"do_remote_decode": True})
    engine.scheduler.update_connector_output(compute(engine, first, [1, 2, 3]))
    _, params = finish(engine, first)

    def saved():
        engine.scheduler.update_connector_output(engine.step())
        return engine.pool.pinned == N  # by the hold alone

    until(saved, "the save does not end")
    r = request(tag, keys(N), N * BLOCK_TOKENS + 1, kv_transfer_params=params)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r) == (N * BLOCK_TOKENS, False)
    return r


def forward(engine, r, attention):
    """Schedule a request with its load, and run what stands for the model; what the worker reports."""
    park(engine, r, BLOCKS, N * BLOCK_TOKENS)

    def model():
        engine.worker.start_load_kv(None)  # as vLLM does: before the layers
        attention()

    out = engine.step([(r.request_id, N * BLOCK_TOKENS)], (), {r.request_id: 1}, (), model)
    engine.scheduler.update_connector_output(out)
    return out


def there(engine, layer):
    """How many blocks hold a layer of the prompt."""
    at = [(layer * engine.blocks + block) * LAYER_BYTES for block in BLOCKS[:N]]
    return sum(engine.memfd.map[a : a + LAYER_BYTES] == content(k, layer) for a, k in zip(at, keys(N), strict=True))


def used_early(engine):
    """Loads of which a layer was used before their end, since the last time."""
    return engine.scheduler.scheduler.counters.take()["counts"].get("kvport_shim_loads_by_layer_total", 0)


def over(engine, *requests):
    for r in requests:
        finish(engine, r)
    idle(engine)
    assert engine.pool.pinned == 0


def test_a_layer_is_waited_for(start, here):
    engine, seen = start(), []
    r = handed(engine, "a")

    def attention():
        engine.worker.wait_for_layer_load("l0")
        seen.append((there(engine, 0), there(engine, 1)))
        (here / "gate").touch()
        engine.worker.wait_for_layer_load("l1")
        seen.append((there(engine, 0), there(engine, 1)))

    out = forward(engine, r, attention)
    assert seen == [(N, 0), (N, N)]
    assert not out.invalid_block_ids and not out.finished_recving and not engine.pool.evicted
    assert not engine.scheduler.scheduler.loading and used_early(engine) == 1
    assert engine.scheduler.scheduler.pace._last is not None, "how long it took is not known"
    over(engine, r)
    assert engine.faults() == {}


def test_what_the_model_computes_does_not_make_a_load_slow(start, here, monkeypatch):
    ahead = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr("kvport_vllm.worker.time", clock)
    monkeypatch.setattr("kvport_vllm.worker._SLACK", 2 * HOUR)
    engine = start()
    r = handed(engine, "a")

    def attention():
        engine.worker.wait_for_layer_load("l0")
        ahead[0] = HOUR
        (here / "gate").touch()
        engine.worker.wait_for_layer_load("l1")

    out = forward(engine, r, attention)
    assert not out.invalid_block_ids and used_early(engine) == 1
    assert 0 < engine.scheduler.scheduler.pace._last[0] * N < HOUR, "the next load is parked because this model computes for long"
    over(engine, r)
    assert engine.faults() == {}


def not_at_all(self, name):
    self.unread.discard(name)


def one_too_few(self, name):
    self.unread.discard(name)
    self._wait_while(lambda p: p.layers < self.layers[name])


@pytest.mark.parametrize("wait", [not_at_all, one_too_few])
def test_a_wait_that_is_too_short_is_seen(start, here, monkeypatch, wait):
    monkeypatch.setattr(WorkerSide, "wait_for_layer", wait)
    engine, seen = start(), []
    r = handed(engine, "a")

    def attention():
        for layer in range(2):
            engine.worker.wait_for_layer_load(f"l{layer}")
        seen.append(there(engine, 1))
        (here / "gate").touch()

    forward(engine, r, attention)
    assert seen == [0], "the first test cannot fail"
    over(engine, r)


def test_a_damaged_layer_behind_a_good_one(start, here):
    engine, seen = start("damage"), []
    r = handed(engine, "a")

    def attention():
        engine.worker.wait_for_layer_load("l0")
        seen.append((there(engine, 0), there(engine, 1)))
        (here / "gate").touch()
        engine.worker.wait_for_layer_load("l1")

    out = forward(engine, r, attention)
    assert seen == [(N, 0)]
    assert out.invalid_block_ids == {BLOCKS[N - 1]}, "vLLM does not compute the damaged block again"
    assert engine.pool.evicted == set(BLOCKS[N - 1 :]), "other requests find what was computed on it"
    over(engine, r)
    assert engine.faults() == {}


@pytest.mark.parametrize("victim", [0, -1], ids=["agent", "plugin"])
def test_a_death_behind_a_good_layer(start, here, victim):
    engine = start()
    r = handed(engine, "a")

    def attention():
        engine.worker.wait_for_layer_load("l0")
        os.kill(engine.worker.worker.link._fence.pids[victim], signal.SIGKILL)
        engine.worker.wait_for_layer_load("l1")
        (here / "gate").touch()

    out = forward(engine, r, attention)
    assert out.invalid_block_ids == set(BLOCKS[:N]) and engine.pool.evicted == set(BLOCKS)
    finish(engine, r)
    until(lambda: engine.step() and engine.worker.worker.link.state is State.UP, "no new agent")
    idle(engine)
    assert engine.pool.pinned == 0 and engine.faults() == {}


def test_a_model_that_does_not_wait_for_a_layer(start, here, monkeypatch, caplog):
    engine, seen, asked = start(), [], []
    link = engine.scheduler.scheduler.link
    send = link.send
    monkeypatch.setattr(link, "send", lambda **call: asked.extend(call.get("layer_wise", ())) or send(**call))
    r = handed(engine, "a")

    def one_of_two():
        engine.worker.wait_for_layer_load("l1")

    (here / "gate").touch()
    out = forward(engine, r, one_of_two)
    assert out.invalid_block_ids == set(BLOCKS[:N]), "it may have read a layer that was not there"
    over(engine, r)
    for block in BLOCKS:
        engine.write(block, b"something else")
    r = handed(engine, "b")
    out = forward(engine, r, lambda: seen.append((there(engine, 0), there(engine, 1))))
    assert seen == [(N, N)] and not out.invalid_block_ids, "from then on a load is waited for before the model runs"
    over(engine, r)
    assert asked == ["a"], "a load is checked twice and tried once, for layers that nobody waits for"
    assert [m for m in caplog.messages if "load_by_layer" in m] == ["kvport: load_by_layer is off: vLLM did not wait for l0"]
    assert engine.scheduler.scheduler.counters.take()["counts"]["kvport_shim_load_by_layer_off_total"] == 1
    assert engine.faults() == {}


def test_what_is_not_brought_by_layers_is_waited_for_as_a_whole(start, here):
    plain = Engine(here / "store")
    stored(plain, N)
    name, extra = (plain.config.kv_transfer_config.kv_connector_extra_config[f"kv_connector{k}"] for k in ("", "_extra_config"))
    plain.close()
    engine, seen = start(kv_connector=name, kv_connector_extra_config=extra, engine="other"), []
    r = request("a", keys(N), N * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r) == (N * BLOCK_TOKENS, False)

    def attention():
        for layer in range(2):
            engine.worker.wait_for_layer_load(f"l{layer}")
            seen.append((there(engine, 0), there(engine, 1)))

    out = forward(engine, r, attention)
    assert seen == [(N, N), (N, N)] and not out.invalid_block_ids
    assert used_early(engine) == 0
    over(engine, r)
    assert engine.faults() == {}


def test_a_layer_that_cannot_be_waited_for(start, here, monkeypatch):
    engine = start()
    r = handed(engine, "a")

    def fail(name):
        raise RuntimeError("a fault of ours")

    fail.__name__ = "wait_for_layer"
    monkeypatch.setattr(engine.worker.worker, "wait_for_layer", fail)
    (here / "gate").touch()
    out = forward(engine, r, lambda: engine.worker.wait_for_layer_load("l0"))
    assert out.invalid_block_ids == set(BLOCKS[:N]) and set(engine.faults()) == {"wait_for_layer"}
    assert engine.scheduler.scheduler.by_layer, "a fault of ours is taken for one of vLLM's"
    over(engine, r)
