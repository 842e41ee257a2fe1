"""The connector with a real agent and plugin: what happens between calls, and when processes die."""

import base64
import os
import pathlib
import signal
import statistics
import time

import fakes
import pytest
from engine import BLOCK_TOKENS, LAYERS, Engine, request

from kvport_agent.link import IDLE_WAIT, State

LIMIT = 60.0


def until(what, text):
    deadline = time.monotonic() + LIMIT
    while not (got := what()):
        assert time.monotonic() < deadline, text
        time.sleep(0.002)
    return got


def keys(n, tag=7):
    return [bytes([tag, i]) * 16 for i in range(n)]


def strike(pid, sign):
    """Kill or stop a process, and wait until it runs no more."""
    os.kill(pid, sign)

    def still():
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
        except OSError:
            return True

    until(still, f"process {pid} runs on after signal {sign}")


def idle(engine):
    def over():
        engine.scheduler.update_connector_output(engine.step())
        return not engine.scheduler.has_pending_push_work()

    until(over, "the engine never goes idle")


def compute(engine, r, blocks):
    """Prefill a whole request in one step."""
    engine.scheduler.on_new_request(r)
    n = len(blocks) * BLOCK_TOKENS
    engine.tables[r.request_id] = blocks
    out = engine.step(
        [(r.request_id, 0)], (), {r.request_id: n}, (), lambda: [engine.write(b, r.block_hashes[i]) for i, b in enumerate(blocks)]
    )
    r.num_computed_tokens = n
    return out


def lookup(engine, r, computed=0):
    def ask():
        got = engine.scheduler.get_num_new_matched_tokens(r, computed)
        if got[0] is None:
            engine.step()
        return None if got[0] is None else [got]

    return until(ask, "no answer")[0]


def park(engine, r, blocks, tokens):
    engine.tables[r.request_id] = blocks
    engine.scheduler.update_state_after_alloc(r, fakes.KVCacheBlocks(get_block_ids=lambda: (blocks,)), tokens)


def finish(engine, r, status="FINISHED_LENGTH_CAPPED"):
    r.status = fakes.RequestStatus[status]
    return engine.scheduler.request_finished_all_groups(r, (engine.tables.get(r.request_id, []),))


def received(engine):
    """Step until a load is over, and give that step's output."""

    def step():
        out = engine.step()
        return out if out.finished_recving else None

    return until(step, "the load never ends")


def stored(engine, n=4, id_="a"):
    r = request(id_, keys(n), n * BLOCK_TOKENS + 1)
    engine.scheduler.update_connector_output(compute(engine, r, list(range(1, n + 1))))
    idle(engine)
    finish(engine, r)
    idle(engine)


def test_stored_blocks_come_back_in_another_engine(here):
    first = Engine(here / "store", engine="one")
    stored(first)
    assert first.faults() == {} and first.pool.pinned == 0
    first.close()
    second = Engine(here / "store", engine="two")
    r = request("b", keys(4), 4 * BLOCK_TOKENS + 1)
    second.scheduler.on_new_request(r)
    assert lookup(second, r) == (4 * BLOCK_TOKENS, True)
    park(second, r, [9, 8, 7, 6], 4 * BLOCK_TOKENS)
    out = received(second)
    assert out.finished_recving == {"b"} and not out.invalid_block_ids and not out.failed_recving
    assert all(second.holds(b, keys(4)[i]) for i, b in enumerate([9, 8, 7, 6]))
    second.scheduler.update_connector_output(out)
    assert second.step().finished_recving == set()  # once
    skip = request("s", keys(4), 4 * BLOCK_TOKENS + 1, skip_reading_prefix_cache=True)
    assert second.scheduler.get_num_new_matched_tokens(skip, 0) == (0, False)
    assert second.faults() == {}
    second.close()


def test_events_say_what_the_connector_has(here):
    room = 6 * LAYERS * 4096  # of files: fewer blocks than are stored
    extra = {"shared_storage_path": str(here / "store"), "max_bytes": room}
    engine = Engine(here / "store", kv_connector_extra_config=extra)
    index, seen = set(), {"stored": 0, "removed": 0}

    def told():
        engine.scheduler.has_pending_push_work()  # reads what the agent has said
        for e in engine.scheduler.take_events():
            assert e.medium == "STORAGE"
            if isinstance(e, fakes.BlockRemoved):
                assert index >= set(e.block_hashes)
                index.difference_update(e.block_hashes)
                seen["removed"] += len(e.block_hashes)
            else:
                assert not index & set(e.block_hashes)
                index.update(e.block_hashes)
                seen["stored"] += len(e.block_hashes)
        return seen

    for i in range(8):
        r = request(f"r{i}", keys(4, tag=i), 4 * BLOCK_TOKENS + 1)
        engine.scheduler.update_connector_output(compute(engine, r, [1, 2, 3, 4]))
        idle(engine)
        finish(engine, r)
        idle(engine)
        until(lambda n=seen["stored"]: told()["stored"] > n, "no BlockStored")
    until(lambda: told()["removed"] > 0, "no BlockRemoved although there is no room")
    assert index and index <= {k for i in range(8) for k in keys(4, tag=i)}
    assert engine.scheduler.reset_cache() is True
    told()
    assert index == set()
    stored(engine, id_="after")
    until(lambda: told() and index == set(keys(4)), "no BlockStored after a reset")
    os.kill(engine.worker.worker.link._fence.pids[0], signal.SIGKILL)
    until(lambda: told() and index == set(), "what a dead agent's connector had is still published")
    assert engine.faults() == {}
    engine.close()


def test_ticket_reaches_the_consumer(here):
    producer = Engine(here / "store", engine="p", role="kv_producer")
    r = request("p1", keys(3), 3 * BLOCK_TOKENS + 1, kv_transfer_params={"do_remote_decode": True})
    out = compute(producer, r, [1, 2, 3])
    # vLLM ends a request before it says that the step is over.
    delay, params = finish(producer, r)
    producer.scheduler.update_connector_output(out)
    assert delay is False and params["do_remote_prefill"] is True and params["kvport_ticket"]
    consumer = Engine(here / "store", engine="d", role="kv_consumer")
    c = request("d1", keys(3), 3 * BLOCK_TOKENS + 1, kv_transfer_params=params)
    consumer.scheduler.on_new_request(c)
    assert lookup(consumer, c) == (3 * BLOCK_TOKENS, True)
    idle(producer)
    assert producer.pool.pinned == 0 and producer.faults() == consumer.faults() == {}
    assert producer.scheduler.get_num_new_matched_tokens(r, 0) == (0, False)  # a producer never loads
    producer.close()
    consumer.close()


def test_a_ticket_is_for_full_blocks(here, monkeypatch):
    engine = Engine(here / "store", role="kv_producer")
    r = request("p", keys(4), 4 * BLOCK_TOKENS + 17, kv_transfer_params={"do_remote_decode": True})
    engine.scheduler.update_connector_output(compute(engine, r, [1, 2, 3, 4]))
    engine.tables["p"], r.num_computed_tokens = [1, 2, 3, 4, 5], 4 * BLOCK_TOKENS + 16
    link, sent = engine.scheduler.scheduler.link, []
    call = link.call
    monkeypatch.setattr(link, "call", lambda timeout, **fields: sent.append(fields) or call(timeout, **fields))
    assert finish(engine, r)[1]["kvport_ticket"]
    (ended,) = [fields["finish"] for fields in sent if "finish" in fields]
    assert ended.tokens == 4 * BLOCK_TOKENS and list(ended.blocks.ids) == [1, 2, 3, 4]
    idle(engine)
    engine.close()


def test_what_an_agent_does_not_take_is_not_sent(here):
    engine = Engine(here / "store")
    stored(engine)
    life = engine.scheduler.scheduler.link.life
    nameless = [request(id_, keys(4), 4 * BLOCK_TOKENS + 1) for id_ in ("x" * 1025, "\ud800", "")]
    params = {"do_remote_prefill": True, "kvport_ticket": base64.b64encode(bytes((64 << 10) + 1)).decode()}
    ticket = request("t", keys(4), 4 * BLOCK_TOKENS + 1, kv_transfer_params=params)
    many = [request(f"m{i}", [], 1) for i in range((1 << 14) + 1)]
    for r in [*nameless, ticket, *many]:
        engine.scheduler.on_new_request(r)
    assert [engine.scheduler.get_num_new_matched_tokens(r, 0) for r in nameless] == [(0, False)] * 3
    assert lookup(engine, ticket) == (4 * BLOCK_TOKENS, True)
    for r in [*nameless, ticket, *many]:
        finish(engine, r, "FINISHED_ABORTED")
    idle(engine)
    assert lookup(engine, request("after", keys(4), 4 * BLOCK_TOKENS + 1)) == (4 * BLOCK_TOKENS, True)
    assert engine.scheduler.scheduler.link.life == life, "the agent ended"
    assert engine.faults() == {}
    engine.close()


@pytest.mark.parametrize("victim", ["agent", "plugin"])
def test_a_death_costs_a_load_and_nothing_else(here, victim):
    engine = Engine(here / "store")
    stored(engine)
    for round_ in range(3):
        r = request(f"k{round_}", keys(4), 4 * BLOCK_TOKENS + 1)
        engine.scheduler.on_new_request(r)
        until(lambda r=r: engine.step() and lookup(engine, r)[0], "the store is not offered again")
        park(engine, r, [9, 8, 7, 6], 4 * BLOCK_TOKENS)
        pids = list(engine.worker.worker.link._fence.pids)
        os.kill(pids[0] if victim == "agent" else pids[-1], signal.SIGKILL)
        out = received(engine)
        good = [b for i, b in enumerate([9, 8, 7, 6]) if engine.holds(b, keys(4)[i])]
        assert set(good) | out.invalid_block_ids >= {9, 8, 7, 6}
        engine.scheduler.update_connector_output(out)
        if 9 in out.invalid_block_ids:
            assert lookup(engine, r) == (0, False)
        finish(engine, r, "FINISHED_ABORTED")
    until(lambda: engine.step() and engine.worker.worker.link.state is State.UP, "no new agent")
    idle(engine)
    assert engine.pool.pinned == 0 and engine.faults() == {}
    engine.close()


def test_pins_are_dropped_when_the_agent_dies(here):
    engine = Engine(here / "store")
    link = engine.scheduler.scheduler.link
    r = request("a", keys(4), 4 * BLOCK_TOKENS + 1)
    out = compute(engine, r, [1, 2, 3, 4])
    assert engine.pool.pinned == 4
    strike(link._fence.pids[0], signal.SIGSTOP)  # so that no Saved comes
    engine.scheduler.update_connector_output(out)
    assert engine.pool.pinned == 4 and engine.scheduler.has_pending_push_work()
    os.kill(link._fence.pids[0], signal.SIGKILL)
    idle(engine)
    assert engine.pool.pinned == 0 and engine.faults() == {}
    engine.close()


def test_aborts_in_every_state(here):
    engine = Engine(here / "store")
    stored(engine)
    waiting = request("w", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(waiting)
    assert finish(engine, waiting, "FINISHED_ABORTED") == (False, None)  # without a block
    parked = request("x", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(parked)
    lookup(engine, parked)
    park(engine, parked, [9, 8, 7, 6], 4 * BLOCK_TOKENS)
    first = engine.step()
    assert finish(engine, parked, "FINISHED_ABORTED") == (False, None)
    if not first.finished_recving:  # its blocks stay held until then
        until(lambda: "x" in engine.step().finished_recving, "an aborted load must end too")
    running = request("y", keys(4, 8), 4 * BLOCK_TOKENS + 1)
    out = compute(engine, running, [5, 4, 3, 2])
    assert finish(engine, running, "FINISHED_ABORTED") == (False, None)
    engine.scheduler.update_connector_output(out)
    idle(engine)
    assert engine.pool.pinned == 0 and engine.faults() == {}
    engine.close()


def test_without_a_pool_blocks_stay_with_their_request(here):
    engine = Engine(here / "store", pool=False)
    r = request("a", keys(2), 2 * BLOCK_TOKENS + 1)
    out = compute(engine, r, [1, 2])
    link = engine.scheduler.scheduler.link
    strike(link._fence.pids[0], signal.SIGSTOP)
    delay, _ = finish(engine, r)
    engine.scheduler.update_connector_output(out)
    assert delay is True
    os.kill(link._fence.pids[0], signal.SIGCONT)
    until(lambda: "a" in engine.step().finished_sending, "the blocks are never given back")
    idle(engine)
    assert engine.faults() == {}
    engine.close()


def test_an_answer_that_comes_too_late_is_asked_for_again_at_once(here, monkeypatch):
    engine = Engine(here / "store")
    stored(engine)
    monkeypatch.setattr("kvport_vllm.scheduler._ASK_AGAIN", LIMIT)
    agent = engine.scheduler.scheduler.link._fence.pids[0]
    r = request("late", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    strike(agent, signal.SIGSTOP)
    assert engine.scheduler.get_num_new_matched_tokens(r, 0) == (None, False)
    os.kill(agent, signal.SIGCONT)
    start = time.monotonic()
    assert lookup(engine, r) == (4 * BLOCK_TOKENS, True)
    assert time.monotonic() - start < LIMIT / 4
    assert engine.faults() == {}
    engine.close()


def test_steps_that_compute_nothing_wait_for_news(here):
    engine = Engine(here / "store")
    stored(engine)
    agent = engine.scheduler.scheduler.link._fence.pids[0]
    r = request("b", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r)[0]
    park(engine, r, [9, 8, 7, 6], 4 * BLOCK_TOKENS)
    strike(agent, signal.SIGSTOP)
    start, steps = time.monotonic(), 20
    for _ in range(steps):
        assert not engine.step().finished_recving
    assert time.monotonic() - start > 0.8 * steps * IDLE_WAIT, "it does not wait for the load"
    running = request("c", keys(1, 3), 2 * BLOCK_TOKENS)
    engine.scheduler.on_new_request(running)
    engine.tables["c"] = [1, 2]
    times = []
    for _ in range(steps):  # with something to compute it never waits
        start = time.monotonic()
        engine.step((), [("c", 40)], {"c": 1})
        times.append(time.monotonic() - start)
    assert statistics.median(times) < IDLE_WAIT / 2
    os.kill(agent, signal.SIGCONT)
    assert received(engine).finished_recving == {"b"}
    assert engine.faults() == {}
    engine.close()


def admit(engine, r, blocks, tokens):
    """Schedule a request with a load that its step waits for; what the worker reports, and what the load found in the blocks."""
    park(engine, r, blocks, tokens)
    seen = []

    def compute():
        engine.worker.start_load_kv(None)  # as vLLM does: before the layers
        seen.append([engine.holds(b, r.block_hashes[i]) for i, b in enumerate(blocks[: tokens // BLOCK_TOKENS])])

    out = engine.step([(r.request_id, tokens)], (), {r.request_id: r.num_tokens - tokens}, (), compute)
    return out, seen[0]


def quick(engine, monkeypatch, n=4):
    """Load once as any load is done at first; from then on loads are known to be quick, on a busy machine too."""
    monkeypatch.setattr("kvport_vllm.pace._QUICK", LIMIT)
    r = request("first", keys(n), n * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r) == (n * BLOCK_TOKENS, True)
    park(engine, r, list(range(10, 10 + n)), n * BLOCK_TOKENS)
    engine.scheduler.update_connector_output(received(engine))
    finish(engine, r)
    idle(engine)


def test_a_lone_request_loads_within_its_step(here, monkeypatch):
    engine = Engine(here / "store", waits=True)
    stored(engine)
    quick(engine, monkeypatch)
    r = request("b", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r) == (4 * BLOCK_TOKENS, False)
    out, seen = admit(engine, r, [21, 22, 23, 24, 25], 4 * BLOCK_TOKENS)
    assert seen == [True] * 4 and not out.finished_recving and not out.invalid_block_ids
    engine.scheduler.update_connector_output(out)
    assert not engine.scheduler.scheduler.loading and not engine.pool.evicted
    # A second request makes it park: nobody is to be held up by a load.
    other, late = request("c", keys(4), 4 * BLOCK_TOKENS + 1), request("d", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(other)
    engine.scheduler.on_new_request(late)
    assert lookup(engine, late) == (4 * BLOCK_TOKENS, True)
    for done in (r, other, late):
        finish(engine, done)
    # Nothing is left to compute: a step must compute something.
    whole = request("e", keys(4), 4 * BLOCK_TOKENS)
    engine.scheduler.on_new_request(whole)
    assert lookup(engine, whole) == (3 * BLOCK_TOKENS, False)
    finish(engine, whole)
    idle(engine)
    assert engine.faults() == {} and engine.pool.pinned == 0
    engine.close()


@pytest.mark.parametrize("broken", ["wait_for_loads", "wait_for_verdicts"])
def test_a_load_that_cannot_be_waited_for_has_failed(here, monkeypatch, broken):
    engine = Engine(here / "store", waits=True)
    stored(engine)
    quick(engine, monkeypatch)
    r = request("b", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r) == (4 * BLOCK_TOKENS, False)

    def fail():
        raise RuntimeError("a fault of ours")

    fail.__name__ = broken
    monkeypatch.setattr(engine.worker.worker, "wait_for_loads", fail if broken == "wait_for_loads" else lambda: None)
    if broken == "wait_for_verdicts":
        monkeypatch.setattr(engine.worker.worker, broken, fail)
    out, _ = admit(engine, r, [21, 22, 23, 24, 25], 4 * BLOCK_TOKENS)
    assert set(engine.faults()) == {broken} and out.invalid_block_ids == {21, 22, 23, 24}
    engine.scheduler.update_connector_output(out)
    assert engine.pool.evicted == {21, 22, 23, 24, 25}
    finish(engine, r)
    idle(engine)
    engine.close()


@pytest.mark.parametrize("victim", ["agent", "plugin"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_load_within_a_step_fails_with_its_process(here, monkeypatch, victim, sign):
    monkeypatch.setattr("kvport_vllm.worker._WAIT_AT_MOST", 0.5)
    engine = Engine(here / "store", waits=True)
    stored(engine)
    quick(engine, monkeypatch)
    r = request("b", keys(6), 6 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r) == (4 * BLOCK_TOKENS, False)
    blocks = [21, 22, 23, 24, 25, 26, 27]
    pids = list(engine.worker.worker.link._fence.pids)
    strike(pids[0] if victim == "agent" else pids[-1], sign)
    began = time.monotonic()
    out, _ = admit(engine, r, blocks, 4 * BLOCK_TOKENS)
    assert time.monotonic() - began < LIMIT / 2
    bad = out.invalid_block_ids
    if bad:  # else the load was over before the process was hit, or the plugin has come back in time
        assert bad == {21, 22, 23, 24}
        engine.scheduler.update_connector_output(out)
        assert engine.pool.evicted == set(blocks), "other requests find blocks that were computed on top of bad ones"
        assert engine.pool.pinned == 0, "blocks that were computed on top of bad ones are saved"
    elif sign == signal.SIGSTOP:
        assert all(engine.holds(b, r.block_hashes[i]) for i, b in enumerate(blocks[:4]))
    finish(engine, r)
    idle(engine)
    assert engine.faults() == {}
    engine.close()


def test_mirror(here, monkeypatch):
    import ctypes

    from engine import Tensors

    def out(self, tensor, block, ratio, into):
        into[:] = ctypes.string_at(tensor.address + block * tensor.strides[0], len(into))

    def back(self, tensor, block, ratio, data):
        ctypes.memmove(tensor.address + block * tensor.strides[0], bytes(data), len(data))

    monkeypatch.setattr(Tensors, "copy_out", out, raising=False)
    monkeypatch.setattr(Tensors, "copy_in", back, raising=False)
    monkeypatch.setattr("engine.memory.adopted", lambda *a: None)
    monkeypatch.setattr("engine.memory.move", lambda *a: (_ for _ in ()).throw(OSError("no")))
    engine = Engine(here / "store", waits=True, kvport={"load_by_layer": True})
    assert engine.worker.worker.shared.how == "mirror" and engine.scheduler.scheduler.by_layer
    stored(engine)
    assert not engine.scheduler.scheduler.by_layer, "loads are checked twice for layers that no rank waits for"
    r = request("b", keys(4), 4 * BLOCK_TOKENS + 1)
    engine.scheduler.on_new_request(r)
    assert lookup(engine, r)[0]
    park(engine, r, [9, 8, 7, 6], 4 * BLOCK_TOKENS)
    until(lambda: engine.step().finished_recving, "no load")
    assert all(engine.holds(b, keys(4)[i]) for i, b in enumerate([9, 8, 7, 6]))
    engine.close()


def test_a_refused_start_says_why(here):
    from kvport_agent.errors import ConfigError

    with pytest.raises(ConfigError, match="shared_storage_pat"):
        Engine(here / "store", kv_connector_extra_config={"shared_storage_pat": "x"})
    with pytest.raises(ConfigError, match="NoSuchConnector"):
        Engine(here / "store", kv_connector="NoSuchConnector")


def test_an_idle_step_costs_next_to_nothing(here):
    engine = Engine(here / "store")
    requests = [request(f"r{i}", keys(1, i), BLOCK_TOKENS + 1) for i in range(8)]
    for i, r in enumerate(requests):
        engine.scheduler.update_connector_output(compute(engine, r, [1 + 2 * i]))
        engine.tables[r.request_id].append(2 + 2 * i)
    idle(engine)
    cached = [(r.request_id, BLOCK_TOKENS + 1) for r in requests]
    scheduled = {r.request_id: 1 for r in requests}
    output = fakes.SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=fakes.CachedRequestData(
            req_ids=[r for r, _ in cached], num_computed_tokens=[n for _, n in cached], resumed_req_ids=set(), new_block_ids=[None] * 8
        ),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=set(),
        kv_connector_block_state=fakes.BlockState({}),
    )
    took, hooks = [], 0
    for _ in range(2000):
        start = time.perf_counter_ns()
        meta = engine.scheduler.build_connector_meta(output)
        engine.worker.bind_connector_metadata(meta)
        engine.worker.start_load_kv(None)
        for layer in range(LAYERS * 15):  # 30 layers
            engine.worker.wait_for_layer_load(layer)
            engine.worker.save_kv_layer(layer, None, None)
        engine.worker.wait_for_save()
        engine.worker.get_transfer_results(set())
        engine.worker.get_block_ids_with_load_errors()
        engine.worker.build_connector_worker_meta()
        engine.scheduler.has_pending_push_work()
        took.append((time.perf_counter_ns() - start) / 1000)
        hooks = 9 + 2 * LAYERS * 15
    assert meta.ack == 0 and not meta.loads
    p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
    print(f"\nhooks of a decode step of 8 requests and 30 layers: {hooks} calls, p50 {p50:.0f} us, p99 {p99:.0f} us")
    assert p50 < 1000  # the real bound is measured with vLLM; this is for what is quadratic by mistake
    engine.close()
