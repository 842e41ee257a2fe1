import base64
import ctypes
import functools
import hashlib
import json
import mmap
import os
import random
import types

import fakes
import pytest

from kvport_agent import binary, content
from kvport_agent.errors import ConfigError, UnsupportedError
from kvport_agent.link import State
from kvport_agent.messages import LAYERS, LOADED, LOST, RELEASED, SAVED, message
from kvport_vllm import config, keys, layout, memory, setup, stats, tracking
from kvport_vllm.events import Events
from kvport_vllm.layout import Group, View
from kvport_vllm.lora import Adapters, with_adapter
from kvport_vllm.meta import Load, StepDone, StepMetadata
from kvport_vllm.pace import Pace, layers_may_wait, steps_may_wait
from kvport_vllm.pins import Delayed, Pins
from kvport_vllm.scheduler import SchedulerSide
from kvport_vllm.worker import WorkerSide

B, L, H, N, C, ITEM = 5, 3, 2, 4, 8, 4  # blocks, layers, heads, tokens, content, bytes


def views(order, base=1 << 20):
    """Views of all layers in a layout named as vLLM names it, such as LBHNC."""
    sizes = dict(zip("LBHNC", (L, B, H, N, C), strict=True))
    strides, n = {}, ITEM
    for axis in reversed(order):
        strides[axis] = n
        n *= sizes[axis]
    return {f"l{i}": View(base + i * strides["L"], (B, H, N, C), tuple(strides[a] for a in "BHNC"), ITEM) for i in range(L)}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_segments_cover_every_byte_once(order):
    group = Group(("l0", "l1", "l2"), N)
    segments = layout.segments_of([group], views(order), B, lambda a: a - (1 << 20))
    seen = set()
    for block in range(B):
        for s in segments:
            start = s.offset + block * s.stride
            piece = set(range(start, start + s.bytes))
            assert not piece & seen
            seen |= piece
    assert seen == set(range(L * B * H * N * C * ITEM))
    assert len(segments) == (L * H if order in ("LHBNC", "BHLNC") else L)
    message_ = layout.to_message("x", [group], segments, B)
    assert message_.groups[0].block_tokens == N and len(message_.segments) == len(segments)


def test_layers_have_the_numbers_of_their_segments():
    own = views("LBHNC")
    shared = {**own, "l2": own["l0"], "l3": own["l2"]}
    group = Group(("l0", "l1", "l2", "l3"), N)
    assert layout.layer_numbers([group], shared) == {"l0": 0, "l1": 1, "l2": 0, "l3": 3}
    assert {s.layer for s in layout.segments_of([group], shared, B, lambda a: a - (1 << 20))} == {0, 1, 3}


def test_kernel_blocks_are_parts_of_a_block():
    whole = views("LBHNC")["l0"]
    half = View(whole.address, (2 * B, H, N // 2, C), (whole.strides[0] // 2, N // 2 * C * ITEM, C * ITEM, ITEM), ITEM)
    assert list(layout.dense(half, B)) == [(whole.address, whole.strides[0], H * N * C * ITEM)]


def test_layouts_that_are_refused():
    with pytest.raises(UnsupportedError, match="blocks first"):
        list(layout.dense(View(0, (2, 7, 3), (84, 12, 4), 4), 5))
    with pytest.raises(UnsupportedError, match="overlaps"):
        list(layout.dense(View(0, (5, 2, 8), (64, 4, 4), 4), 5))
    with pytest.raises(UnsupportedError, match="no tensor"):
        layout.segments_of([Group(("a",), 4)], {}, 5, lambda a: a)


def group_of(spec, **more):
    return fakes.KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=spec, **more)


def test_groups():
    full = fakes.FullAttentionSpec(block_size=16, sliding_window=None)
    window = fakes.SlidingWindowSpec(block_size=16, sliding_window=33)
    got = layout.groups_of(fakes.KVCacheConfig(kv_cache_groups=[group_of(full), group_of(window)]))
    assert [g.window for g in got] == [None, 33] and got[1].trailing == 3
    for spec, text in (
        (fakes.MambaSpec(block_size=16), "MambaSpec"),
        (fakes.SlidingWindowSpec(block_size=32, sliding_window=9), r"\[16, 32\].*SlidingWindowSpec"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            layout.groups_of(fakes.KVCacheConfig(kv_cache_groups=[group_of(full), group_of(spec)]))


def outer(**values):
    base = {
        "engine_id": "e",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_connector": "SomeConnector"},
    }
    return fakes.KVTransferConfig(**{**base, **values})


@pytest.fixture
def kvport(tmp_path, monkeypatch):
    tool = tmp_path / "kvport"
    tool.write_text("#!/bin/sh\necho 'config: kv_role: is bad' >&2\nexit 2\n")
    tool.chmod(0o700)
    monkeypatch.setenv("KVPORT_BIN", str(tool))
    return tool


def test_config_is_completed(kvport):
    got = config.merge(outer(kv_role="kv_producer"))
    assert (got.engine, got.role, got.loads, got.saves) == ("e", "kv_producer", False, True)
    assert '"kv_load_failure_policy": "fail"' in got.text
    with pytest.raises(ConfigError, match="kv_role: is bad"):
        config.check(got)


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        ({}, "kv_connector_extra_config.kv_connector"),
        ({"kv_connector": "X", "kv_role": "kv_consumer"}, "kv_connector_extra_config.kv_role.*kv_both"),
        ({"kv_connector": "X", "kv_load_failure_policy": "recompute"}, "kv_load_failure_policy"),
        ({"kv_connector": "X", "kvport": {"memory": "x"}}, "kvport.memory"),
        ({"kv_connector": "X", "kvport": {"allow_weak_hashes": 1}}, "kvport.allow_weak_hashes"),
        ({"kv_connector": "X", "kvport": {"load_by_layer": "yes"}}, "kvport.load_by_layer"),
        ({"kv_connector": "X", "kvport": {"load_by_layer": True, "load_in_step": False}}, "kvport.load_by_layer"),
    ],
)
def test_config_errors_name_the_field(kvport, inner, text):
    with pytest.raises(ConfigError, match=text):
        config.merge(outer(kv_connector_extra_config=inner))


def test_invented_engine_id_gives_way(kvport):
    invented = "5e3c8d3e-4f0a-4b6e-9f9c-2b8c3a1d0e4f"
    inner = {"kv_connector": "X", "engine_id": "mine"}
    assert config.merge(outer(engine_id=invented, kv_connector_extra_config=inner)).engine == "mine"
    assert config.merge(outer(engine_id=invented + "_dp1", kv_connector_extra_config=inner)).engine == "mine_dp1"
    with pytest.raises(ConfigError, match="engine_id"):
        config.merge(outer(engine_id="yours", kv_connector_extra_config=inner))


def test_class_lookup_checks_the_config_early(kvport):
    import kvport_vllm

    def like_vllm(kv_transfer_config):
        return kvport_vllm.KvportConnector

    with pytest.raises(ConfigError, match="kv_role: is bad"):
        like_vllm(outer())
    assert kvport_vllm.KvportConnector.__name__ == "KvportConnector"  # no config in sight: checked later


@pytest.mark.parametrize("lossy", [True, False])
def test_check_says_whether_a_connector_is_lossy(kvport, lossy):
    kvport.write_text(f"#!/bin/sh\necho '{json.dumps({'connector': 'X', 'lossy': lossy})}'\n")
    assert config.check(config.merge(outer(engine_id=f"lossy-{lossy}"))) is lossy


@pytest.mark.parametrize("said", ["", "it is fine", "{}", "[]", "null", '"lossy"'])
def test_check_by_another_version(kvport, said):
    kvport.write_text(f"#!/bin/sh\necho '{said}'\n")
    with pytest.raises(ConfigError, match=f"{kvport} does not say whether"):
        config.check(config.merge(outer(engine_id="other-version")))


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_vllm_must_not_share_what_nobody_has_verified(role):
    def parts(role, caching, lossy):
        vllm = types.SimpleNamespace(cache_config=types.SimpleNamespace(**caching), parallel_config=types.SimpleNamespace())
        return setup.Parts(vllm, fakes.KVCacheConfig(kv_cache_groups=[]), config.Config("", "e", role, ""), lossy)

    for caching in ({"enable_prefix_caching": True}, {}):
        with pytest.raises(UnsupportedError, match="--no-enable-prefix-caching"):
            parts(role, caching, True)
    for others in ((role, {"enable_prefix_caching": False}, True), ("kv_producer", {}, True), (role, {}, False)):
        with pytest.raises(UnsupportedError, match="no KV cache groups"):  # further on
            parts(*others)


@pytest.mark.parametrize("lossy", [True, False])
def test_preemption_and_what_was_computed_before_it(lossy):
    side, _ = saves_and_holds(fakes.BlockPool(10))
    tracked = tracking.Tracked(None, "p", None)
    side.requests["p"], side.lossy = tracked, lossy
    side.saving._running[1] = [tracking.Completion(tracked, 0, 1, [[4]])]
    side.pins.add(("ack", 1, "p"), [4])
    side._preempted({"p"})
    assert (("ack", 1, "p") in side.pins) is not lossy, "a lossy load may have tainted it, and preemption ends the taint"


def test_preemption_of_a_lossy_load_offers_its_blocks_again():
    side, _ = saves_and_holds(fakes.BlockPool(10))
    side.requests["p"], side.lossy = tracking.Tracked(None, "p", None, have=2), True
    side._preempted({"p"})
    assert side.requests["p"].have == 0


@pytest.mark.parametrize("lossy", [True, False])
def test_what_nobody_has_verified_outlives_the_agent_that_knows_of_it(lossy):
    """A new agent would save what the request computes on a load of the old one, and hand it over."""
    side, _ = saves_and_holds(fakes.BlockPool(10))
    side.lossy = lossy
    side.link.send, side.link.call = lambda **_: True, lambda *_, **__: None
    side.link.life = side._life = 7
    request = types.SimpleNamespace(request_id="p", num_tokens=13, num_computed_tokens=12, block_hashes=[bytes(32)] * 3)
    tracked = side.requests["p"] = tracking.Tracked(request, "p", keys.Keys(), remote=True)

    def offers():
        output = fakes.SchedulerOutput(
            num_scheduled_tokens={"p": 12},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=fakes.CachedRequestData(req_ids=["p"], num_computed_tokens=[0]),
            kv_connector_block_state=fakes.BlockState({"p": [[4, 5, 6]]}),
        )
        meta = StepMetadata()
        side.saving.completes(output, side.requests, meta)
        return meta.ack > 0

    side.allocated(request, [[4, 5]], 8)
    side.flush()
    assert offers(), "the agent that loaded them refuses them by itself"
    side.link.lost, side.link.life = 1, 8
    side.poll()
    assert tracked.told == 8 and offers() is not lossy
    side.finished(request, [[4, 5, 6]], 1, True)
    assert [e.remote for e in side._step.ended] == ([False] if lossy else []), "the others are finished with a ticket"

    side.requests["p"] = tracked
    side._preempted({"p"})
    assert offers() is lossy, "its blocks are others now"


def test_durations():
    assert [binary.seconds(v, 9.0) for v in (2, "250ms", "1m30s", "x", None, True)] == [2.0, 0.25, 90.0, 9.0, 9.0, 9.0]


def test_the_hosts_deadlines_are_ours(kvport):
    def limits(deadlines):
        inner = {"kv_connector": "X", "kvport": {"deadlines": deadlines}}
        got = config.merge(outer(kv_connector_extra_config=inner))
        return got.transfer_seconds, got.transfer_per_gib, got.later_seconds

    assert limits({"transfer": "7s", "transfer_per_gib": 2, "later": "1m"}) == (7.0, 2.0, 60.0)
    assert limits({}) == limits(None) == limits("wrong: kvport says so") == (5.0, 1.0, 2.0)


def test_keys():
    hashes = [bytes([i]) * 32 for i in range(3)]
    plain = keys.Keys()
    assert plain.joined(hashes) == b"".join(hashes) and plain.one(hashes, 3) == keys.PARTIAL
    adapted = keys.Keys(b"content")
    assert adapted.one(hashes, 1) == with_adapter(hashes[1], b"content") != hashes[1]
    assert adapted.joined(hashes)[32:64] == adapted.one(hashes, 1)
    assert keys.Keys().one([b"short"], 0) == hashlib.sha256(b"short").digest()
    assert keys.check_algorithm("sha256_cbor", False) == "vllm/sha256_cbor"
    with pytest.raises(UnsupportedError, match="xxhash"):
        keys.check_algorithm("xxhash", False)
    assert keys.check_algorithm("xxhash", True) == "vllm/xxhash"


def test_tickets():
    params = tracking.params_with(b"\x00ticket")
    assert tracking.ticket_of(params) == b"\x00ticket" and params["do_remote_prefill"] is True
    for bad in (
        None,
        [],
        {},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "kvport_ticket": "*"},
        {"do_remote_prefill": True, "kvport_ticket": 7},
        {"kvport_ticket": base64.b64encode(b"x").decode()},
        {"do_remote_prefill": True, "kvport_ticket": base64.b64encode(bytes(tracking.MOST_TICKET + 1)).decode()},
    ):
        assert tracking.ticket_of(bad) == b""
    assert tracking.wants_remote({"do_remote_decode": True}) and not tracking.wants_remote(None)


def test_pins_are_dropped_once():
    pool, pins = fakes.BlockPool(10), Pins()
    pins.bind(pool)
    pins.add("a", [1, 2, 3])
    pins.move("a", "b", {1, 2})
    assert pool.pinned == 2 and "a" not in pins
    pins.drop("b")
    pins.drop("b")
    pins.add("c", [4])
    pins.drop_all()
    assert pool.pinned == 0 and len(pins) == 0 and pool.touched == pool.freed


def test_pool_that_counts_nothing_is_not_bound():
    pins = Pins()
    pins.bind(types.SimpleNamespace(touch=None))
    assert pins.pool is None


def test_delayed():
    d = Delayed()
    d.began("r")
    d.began("r")
    assert d.wait("r") and not d.wait("other")
    d.ended("r")
    assert d.take() == []
    d.ended("r")
    assert d.take() == ["r"] and d.take() == [] and len(d) == 0
    d.began("x")
    d.wait("x")
    d.end_all()
    assert d.take() == ["x"]


def saves_and_holds(pool):
    """A scheduler's side that saves block 3 of an ended request in step 5 and holds blocks 1 and 2, and what its agent says next."""
    said = []
    link = types.SimpleNamespace(poll=lambda: [said.pop(0)] if said else [], lost=0, state=State.UP, life=0)
    side = SchedulerSide(link, 4, 1, None, Events(4, None))
    if pool is not None:
        side.pins.bind(pool)
    side.saving.hold("r", [[1, 2]])
    side.pins.add(("save", 1), [3])
    side.delayed.began("r")
    side.saving._unsent.append((1, tracking.Completion(tracking.Tracked(None, "r", None), 0, 1, [[3]])))
    side.saving.sent(5, True)
    assert side.delayed.wait("r") and side.busy()
    return side, said


@pytest.mark.parametrize("pool", [fakes.BlockPool(10), None])
def test_lost_blocks_stay_for_good_and_nobody_waits_for_them(pool):
    event = message("AgentEvent")
    side, said = saves_and_holds(pool)
    said.append(event(kind=LOST, request="r", step=5, blocks=[3], failed=[3]))
    assert side.busy(), "the hold is not over"
    said.append(event(kind=LOST, request="r", step=5, blocks=[1, 2], held=True))
    assert not side.busy(), "vLLM would step for ever"
    side.saving.forget()  # what happens when the agent ends
    side.delayed.end_all()
    assert side.delayed.take() == [], "the request would give its blocks back"
    assert pool is None or pool.pinned == 3


def test_a_lost_save_keeps_what_a_hold_lets_go():
    event = message("AgentEvent")
    pool = fakes.BlockPool(10)
    side, said = saves_and_holds(pool)
    said += [event(kind=LOST, request="r", step=5, blocks=[3], failed=[3]), event(kind=RELEASED, request="r", step=5)]
    side.poll()
    side.poll()
    assert pool.pinned == 1 and side.delayed.take() == [] and not side.busy()
    side, said = saves_and_holds(None)
    said += [event(kind=SAVED, request="r", step=5, blocks=[3]), event(kind=RELEASED, request="r", step=5)]
    side.poll()
    side.poll()
    assert side.delayed.take() == ["r"] and not side.busy()


def test_a_preempted_request_is_not_waited_for_because_of_a_lost_save():
    d = Delayed()
    d.began("r")
    d.began("r")
    d.keep("r")
    assert d.busy("r"), "its other save goes on"
    d.ended("r")
    assert not d.busy("r") and d.wait("r") and d.take() == []


def test_pace():
    pace = Pace()
    assert not pace.quick(1), "nothing is known yet"
    pace.took(0.010, 10)
    assert pace.quick(50) and not pace.quick(51)
    pace.took(0.001, 10)
    assert not pace.quick(51), "one load may have been lucky"
    pace.took(0.001, 10)
    assert pace.quick(500)
    pace.failed()
    assert not pace.quick(1)


def test_which_engines_wait_in_a_step():
    def asked(groups=1, scheduling=False, pipeline=1, data=1, zeroing=False):
        return steps_may_wait(
            types.SimpleNamespace(
                scheduler_config=types.SimpleNamespace(async_scheduling=scheduling),
                parallel_config=types.SimpleNamespace(pipeline_parallel_size=pipeline, data_parallel_size=data),
            ),
            types.SimpleNamespace(needs_kv_cache_zeroing=zeroing),
            groups,
        )

    assert asked()
    assert not any((asked(groups=2), asked(scheduling=True), asked(pipeline=2), asked(data=2), asked(zeroing=True), asked(scheduling=None)))


def test_which_models_wait_for_their_layers():
    def asked(spec, speculation=None):
        cache = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec)])
        return layers_may_wait(types.SimpleNamespace(speculative_config=speculation), cache)

    assert asked(object())
    assert not asked(types.SimpleNamespace(kv_cache_specs={})), "an index may be read before the layer that it belongs to"
    assert not asked(object(), object()), "a drafter runs behind what the step reports"


def test_graphs_are_in_pieces_where_layers_are_waited_for():
    from kvport_vllm.connector import KvportConnector

    whole = ({}, {"kvport": None}, {"kvport": {}}, {"kvport": {"load_by_layer": False}})
    assert not any(KvportConnector.requires_piecewise_for_cudagraph(extra) for extra in whole)
    assert KvportConnector.requires_piecewise_for_cudagraph({"kvport": {"load_by_layer": True}})


def test_counters():
    c = stats.Counters()
    assert c.take()["counts"] == dict.fromkeys(stats.SHIM, 0), "zeros from the start: the first increment is one"
    state = message("AgentState")()
    x, zero = stats.key_of("kvport_x_total", ["connector", "s"]), "kvport_zero_total"
    state.counters.add(name="kvport_x_total", labels=["connector", "s"], value=5, help="Xs.")
    state.counters.add(name=zero, value=0)
    state.counters.add(name="kvport_g", value=2, gauge=True)
    c.take_state(state)
    c.take_state(state)
    got = c.take()
    assert got["counts"] == {x: 5.0, zero: 0.0} and got["gauges"] == {"kvport_g": 2.0} and got["help"] == {"kvport_x_total": "Xs."}
    assert c.take() is None
    c.agent_lost()
    c.take_state(state)
    assert stats.reduce(stats.merge(got, c.take())) == {"kvport_x_total": 10, "kvport_g": 2, "kvport_shim_agents_lost_total": 1}
    assert stats.split_key(stats.key_of("n", ["a", "b"])) == ("n", ["a"], ["b"])


def histogram_state(counts, total):
    state = message("AgentState")()
    k = state.counters.add(name="kvport_s", labels=["of", "x"], help="Seconds.")
    k.histogram.bounds.extend([0.1, 1])
    k.histogram.counts.extend(counts)
    k.histogram.sum = total
    return state


def test_histograms_keep_their_buckets():
    c = stats.Counters()
    c.take()
    key = stats.key_of("kvport_s", ["of", "x"])
    c.take_state(histogram_state([0, 0, 0], 0))
    first = c.take()
    assert first["histograms"][key]["counts"] == [0, 0, 0], "it is there before it has observed anything"
    c.take_state(histogram_state([2, 1, 0], 0.9))
    second = c.take()
    c.take_state(histogram_state([2, 3, 1], 7.5))
    third = c.take()
    assert third["histograms"][key]["counts"] == [0, 2, 1]
    c.agent_lost()
    c.take_state(histogram_state([1, 0, 0], 0.05))
    all_ = stats.merge(stats.merge(first, second), stats.merge(third, c.take()))
    assert all_["histograms"][key]["counts"] == [3, 3, 1]
    assert abs(all_["histograms"][key]["sum"] - 7.55) < 1e-9
    assert stats.reduce(all_)["kvport_s_count"] == 7


@pytest.mark.parametrize(
    ("counts", "total"),
    [([3, 0, 0], 0.2), ([2, 4, 0], 1.9), ([0, 0, 2], 9.0), ([1, 1, 3], 12.0), ([5, 0, 0], 0.5), ([0, 2, 0], 0.2), ([0, 0, 0], 0.0)],
)
def test_spread_fills_the_buckets(counts, total):
    got = [0, 0, 0]
    values = stats.spread({"bounds": [0.1, 1], "counts": counts, "sum": total})
    for value, n in values:
        got[0 if value <= 0.1 else 1 if value <= 1 else 2] += n
    assert got == counts
    assert abs(sum(value * n for value, n in values) - total) < 1e-5


class FakeMetric:
    """A metric of prometheus_client, as far as the package uses it."""

    def __init__(self, made, kind, name, documentation, labelnames, buckets=None):
        self.kind, self.name, self.text, self.labelnames, self.buckets = kind, name, documentation, labelnames, buckets
        self.got = {}
        made.append(self)

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        note = self.got.setdefault(values, []).append
        return types.SimpleNamespace(inc=note, set=note, observe=note)


def test_prom_metrics_are_of_their_kind():
    import prometheus_client  # a stand-in

    from kvport_vllm.prom import KvportPromMetrics

    made = []
    kinds = {getattr(prometheus_client, kind): functools.partial(FakeMetric, made, kind) for kind in ("Counter", "Gauge", "Histogram")}
    page = KvportPromMetrics(None, kinds, ["model", "engine"], {0: ["m", "0"]})
    c = stats.Counters()
    c.take_state(histogram_state([2, 0, 0], 0.1))
    page.observe(c.take())
    by = {m.name: m for m in made}
    h = by["kvport_s"]
    assert (h.kind, h.buckets, h.text, h.labelnames) == ("Histogram", [0.1, 1], "Seconds.", ["model", "engine", "of"])
    assert [round(v, 6) for v in h.got[("m", "0", "x")]] == [0.05, 0.05]
    lookups = by["kvport_shim_lookups_total"]
    assert lookups.kind == "Counter" and lookups.text == stats.SHIM["kvport_shim_lookups_total"]
    assert lookups.got[("m", "0")] == [0], "it is on the page before anything happened"


def test_content_cache_reads_once(tmp_path):
    weights = tmp_path / "m" / "w.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    cache = content.ContentCache(tmp_path / "c")
    first = content.content_of(weights.parent, cache)
    assert content.content_of(weights.parent, content.ContentCache(tmp_path / "c")) == first
    weights.write_bytes(b"two")
    assert content.content_of(weights.parent, cache) != first
    assert content.content_of(tmp_path / "none", cache) is None
    assert content.digest(["a", "bc"]) != content.digest(["ab", "c"])


def test_adapter_content(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapters = Adapters(content.ContentCache(tmp_path / "cache"))
    adapter = fakes.LoRARequest(lora_path=str(tmp_path), lora_name="a")
    adapters.content(adapter)  # begins to read, off this thread
    (future,) = adapters._found.values()
    future.result(10)
    assert len(adapters.content(adapter)) == 32
    broken = fakes.LoRARequest(lora_path=str(tmp_path / "none"), lora_name="b")
    adapters.content(broken)
    for f in adapters._found.values():
        f.exception(10)
    with pytest.raises(OSError, match="none"):
        adapters.content(broken)
    adapters.close()


class Plain:
    """A tensor of one layer over memory that is not torch's."""

    def __init__(self, address, view, size):
        self.address, self.the_view, self.size = address, view, size


class PlainTensors:
    def view(self, tensor):
        return tensor.the_view

    def storage(self, tensor):
        return tensor.address, tensor.size

    def on_host(self, tensor):
        return True

    def make_movable(self, tensor):
        return tensor.address, tensor.size

    def copy_out(self, tensor, block, ratio, into):
        stride = tensor.the_view.strides[0] * ratio
        into[:] = ctypes.string_at(tensor.the_view.address + block * stride, len(into))

    def copy_in(self, tensor, block, ratio, data):
        stride = tensor.the_view.strides[0] * ratio
        ctypes.memmove(tensor.the_view.address + block * stride, bytes(data), len(data))


def plain_cache(order="LBHNC"):
    size = L * B * H * N * C * ITEM
    area = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[:] = random.Random(1).randbytes(size)
    caches = {n: Plain(address, v, size) for n, v in views(order, address).items()}
    return area, caches, [Group(("l0", "l1", "l2"), N)]


def test_move_keeps_content_and_shares_it():
    area, caches, groups = plain_cache()
    before = bytes(area)
    shared = memory.share(PlainTensors(), caches, groups, B, None, "move")
    assert bytes(area) == before == bytes(shared.memfd.map[: len(before)])
    shared.memfd.map[7] = (before[7] + 1) % 256
    assert area[7] == (before[7] + 1) % 256
    assert shared.memfd.size >= layout.digest_room(len(before), shared.segments, B) - 1
    shared.memfd.close()


def test_mirror_copies_blocks_both_ways():
    area, caches, groups = plain_cache()
    shared = memory.share(PlainTensors(), caches, groups, B, None, "mirror")
    shared.mirror.save([[2]])
    s = shared.segments[1]
    at = s.offset + 2 * s.stride
    view = caches["l1"].the_view
    assert shared.memfd.map[at : at + s.bytes] == ctypes.string_at(view.address + 2 * view.strides[0], s.bytes)
    shared.memfd.map[at : at + s.bytes] = b"\x55" * s.bytes
    shared.mirror.load([[2]])
    assert ctypes.string_at(view.address + 2 * view.strides[0], s.bytes) == b"\x55" * s.bytes
    assert area is not None
    shared.memfd.close()


def test_adopted_memory_is_recognised():
    memfd = memory.Memfd(1 << 16)
    caches = {n: Plain(memfd.address, v, 1 << 15) for n, v in views("BLHNC", memfd.address).items()}
    shared = memory.share(PlainTensors(), caches, [Group(("l0", "l1", "l2"), N)], B, memfd, "auto")
    assert shared.how == "adopt" and shared.memfd is memfd and min(s.offset for s in shared.segments) == 0
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memfd.fd, 1 << 17)
    assert memfd.address % (2 << 20) == 0, "huge pages would not fit"
    memfd.close()


@pytest.mark.parametrize(("groups", "failed", "invalid"), [(1, set(), {3}), (2, {"r"}, set())])
def test_failed_blocks_of_several_groups(groups, failed, invalid):
    """vLLM cannot tell of which group a block is: the whole request has failed then."""
    link = types.SimpleNamespace(poll=list, state=State.UP, life=7, fenced=set())
    side = WorkerSide(link, groups, 30.0, 0.0)
    side.bind(StepMetadata(loads=[Load("r", 1, 7, [[3, 4]] * groups)]))
    link.poll = lambda: [types.SimpleNamespace(kind=LOADED, request="r", step=1, failed=[3], took_us=0)]
    assert side.results() == (set(), {"r"}, failed)
    assert side.take_invalid() == invalid


def by_layer(said):
    """A worker whose agent says that, and the metadata of a step that loads something layer by layer."""
    link = types.SimpleNamespace(poll=lambda: [said.pop(0)] if said else [], state=State.UP, life=7, fenced=set())
    side = WorkerSide(link, 1, 30.0, 0.0)
    side.layers = {"l0": 0, "l1": 1}
    return side, StepMetadata(loads=[Load("r", 1, 7, [[3]], now=True, by_layer=True)])


@pytest.mark.parametrize("first", [False, True], ids=["step", "end"])
def test_how_long_a_load_by_layer_took_is_what_the_agent_says(first):
    end = types.SimpleNamespace(kind=LOADED, request="r", step=1, failed=[], took_us=2_500_000)
    side, meta = by_layer([end])
    if first:
        side._listen()
    side.bind(meta)
    side.wait_for_loads()
    for name in side.layers:
        side.wait_for_layer(name)
    side.wait_for_verdicts()
    assert side.done() == StepDone(set(), {"r": 2.5})


def test_an_older_agent_does_not_say_how_long_a_load_took(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("kvport_vllm.worker.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    side, meta = by_layer([types.SimpleNamespace(kind=LOADED, request="r", step=1, failed=[], took_us=0)])
    side.bind(meta)
    for name in side.layers:
        side.wait_for_layer(name)
    assert side.done().waited["r"] >= 1, "a load that took no time is quick for ever"


def test_a_layer_is_unread_until_it_is_there():
    side, meta = by_layer([])
    event, seen = types.SimpleNamespace(kind=LAYERS, request="r", step=1, layers=1), []
    side.link.poll = lambda: [seen.append(set(side.unread)) or event]
    side.bind(meta)
    side.wait_for_layer("l0")
    assert seen == [{"l0", "l1"}], "another thread of the model would not wait for it"
    assert side.unread == {"l1"}


def test_one_rank_that_cannot_wait_for_layers_is_enough():
    one, other = StepDone({1}, {"r": 0.1}), StepDone({1}, {"r": 0.2}, 1, "why")
    assert one.aggregate(other) == other.aggregate(one) == StepDone({1}, {"r": 0.2}, 1, "why")
