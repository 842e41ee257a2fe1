"""Requests that wait are looked up in one call, and each of them is answered as if it had been asked about alone."""

import os
import signal
import time
import types

import fakes
import pytest
from engine import BLOCK_TOKENS, Engine, request
from test_agent import LIMIT, finish, idle, keys, park, received, stored, strike, until

from kvport_agent.link import State
from kvport_agent.messages import ANSWERED, message
from kvport_vllm.ahead import AT_MOST, MOST_HASHES, foreseeable
from kvport_vllm.keys import Keys
from kvport_vllm.pins import Pins

N = 16  # requests that wait


class Calls:
    """Counts the calls of a scheduler's side that ask about requests, and how many requests each is about."""

    def __init__(self, engine):
        link = engine.scheduler.scheduler.link
        call = link.call
        self.sizes = []

        def spy(timeout, **fields):
            if "match" in fields:
                self.sizes.append(1 + len(fields.get("ahead", ())))
            return call(timeout, **fields)

        link.call = spy

    def take(self):
        sizes, self.sizes = self.sizes, []
        return sizes


@pytest.fixture
def start(here, monkeypatch):
    """Start engines over one store, in which answers are good for as long as a test takes."""
    monkeypatch.setattr("kvport_vllm.scheduler._MEMO", LIMIT)
    monkeypatch.setattr("kvport_vllm.scheduler._MATCH_WAIT", LIMIT)
    engines = []

    def start_(**more):
        engines.append(Engine(here / "store", **more))
        return engines[-1]

    yield start_
    for engine in engines:
        assert engine.faults() == {}
        engine.close()


def deep(engine):
    """Have the next lookup take along as many as a call may: as if vLLM had asked about so many in its last pass."""
    engine.scheduler.scheduler.ahead._last = 1 << 10


def arrive(engine, n=N, blocks=4):
    """Add requests for what is stored, of which one to four blocks are, in turns; the first lookup takes the others along."""
    deep(engine)
    out = []
    for i in range(n):
        have = keys(4)[: 1 + i % 4]
        r = request(f"w{i}", have + keys(blocks - len(have), 100 + i), blocks * BLOCK_TOKENS + 1)
        engine.scheduler.on_new_request(r)
        out.append(r)
    return out


def want(i, computed=0):
    tokens = (1 + i % 4) * BLOCK_TOKENS - computed
    return max(tokens, 0), tokens > 0


def ask(engine, requests):
    """Ask about requests as one pass of vLLM's scheduler does."""
    return [engine.scheduler.get_num_new_matched_tokens(r, 0) for r in requests]


def answered(engine, requests):
    """Make passes until the agent has answered about all requests; the answers, and the calls of the first pass."""
    calls, got, first = Calls(engine), {}, None

    def over():
        nonlocal first
        open_ = [r for r in requests if r.request_id not in got]
        for r, answer in zip(open_, ask(engine, open_), strict=True):
            if answer[0] is not None:
                got[r.request_id] = answer
        first = first or calls.take()
        engine.step()
        return len(got) == len(requests)

    until(over, "a request has no answer")
    return [got[r.request_id] for r in requests], first


def test_all_that_wait_are_one_call(start):
    engine = start()
    stored(engine)
    requests = arrive(engine)
    got, first = answered(engine, requests)
    assert got == [want(i) for i in range(N)]
    assert first[0] == N
    # The last one was perhaps never asked about by a call of its own, and loads all the same.
    park(engine, requests[-1], [9, 8, 7, 6], 4 * BLOCK_TOKENS)
    assert received(engine).finished_recving == {requests[-1].request_id}
    assert all(engine.holds(b, keys(4)[i]) for i, b in enumerate([9, 8, 7, 6]))
    for r in requests:
        finish(engine, r, "FINISHED_ABORTED")
    idle(engine)
    assert engine.pool.pinned == 0
    counts = engine.scheduler.scheduler.counters.take()["counts"]
    assert 0 < counts["kvport_shim_lookups_total"] <= N
    assert counts["kvport_shim_lookups_ahead_total"] >= N - 1


def test_the_keys_of_a_request_that_waits_are_joined_once(start, monkeypatch):
    engine = start()
    made, joined, asked = [], Keys.joined, []
    monkeypatch.setattr(Keys, "joined", lambda self, hashes: made.append(len(hashes)) or joined(self, hashes))
    requests = arrive(engine, 3)
    scheduler = engine.scheduler.scheduler
    scheduler.flush()
    call = scheduler.link.call

    def spy(timeout, **fields):
        questions = (fields["match"], *fields.get("ahead", ())) if "match" in fields else ()
        asked.append([(q.request, q.tokens, q.computed, bytes(q.keys)) for q in questions])
        return call(timeout, **fields)

    def want(computed):
        return [(r.request_id, r.num_tokens, computed if r is requests[0] else 0, b"".join(r.block_hashes)) for r in requests]

    scheduler.link.call = spy
    for computed in 0, BLOCK_TOKENS:
        ask_anew(engine, requests, computed)
        assert asked.pop() == want(computed)
    assert made == [4, 4, 4]
    more = request("w0", [*requests[0].block_hashes, *keys(1, 200)], 5 * BLOCK_TOKENS + 1)
    requests[0].block_hashes, requests[0].num_tokens = more.block_hashes, more.num_tokens  # as after a preemption
    ask_anew(engine, requests, 0)
    assert asked.pop() == want(0) and made == [4, 4, 4, 5]
    engine.scheduler.update_state_after_alloc(requests[1], None, 0)
    for r in requests:
        scheduler.requests[r.request_id].told = 0
    scheduler._introduce()
    assert [scheduler.requests[r.request_id].query is None for r in requests] == [False, True, False]


def ask_anew(engine, requests, computed):
    """Ask about the first request when nothing is remembered of any; the others come along."""
    for r in requests:
        tracked = engine.scheduler.scheduler.requests[r.request_id]
        tracked.memo, tracked.later_since = None, 0.0
    deep(engine)
    engine.scheduler.get_num_new_matched_tokens(requests[0], computed)


def test_more_than_one_call_can_take(start):
    engine = start()
    stored(engine)
    calls = Calls(engine)
    strike(engine.worker.worker.link._fence.pids[-1], signal.SIGSTOP)  # so that nothing is known before the end of the call's time
    requests = arrive(engine, AT_MOST + 3)
    assert ask(engine, requests) == [(None, False)] * len(requests)
    assert calls.take() == [AT_MOST + 1, 2]
    os.kill(engine.worker.worker.link._fence.pids[-1], signal.SIGCONT)
    answered(engine, requests)


def test_a_call_has_a_limited_number_of_hashes(start):
    engine = start()
    blocks = MOST_HASHES // 4
    requests = arrive(engine, 6, blocks)
    calls = Calls(engine)
    ask(engine, requests[:1])
    assert calls.take() == [4]
    ask(engine, [request("long", keys(4) * blocks, 4 * blocks * BLOCK_TOKENS + 1)])
    assert calls.take() == [1]


def test_a_new_agent_is_told_of_requests_in_several_steps(start, monkeypatch):
    engine = start()
    requests = arrive(engine)
    scheduler = engine.scheduler.scheduler
    scheduler.flush()
    monkeypatch.setattr("kvport_vllm.scheduler._STEP_HASHES", 10)
    link, send, told = scheduler.link, scheduler.link.send, []
    link.send = lambda **fields: told.append([q.request for q in fields["step"].arrived]) or send(**fields)
    for tracked in scheduler.requests.values():
        tracked.told = 0
    scheduler._introduce()
    scheduler.flush()
    assert told == [[r.request_id for r in requests[i : i + 2]] for i in range(0, N, 2)]


def test_an_agent_that_cannot_is_asked_one_by_one(start):
    engine = start()
    stored(engine)
    engine.scheduler.scheduler.link.attached.ahead = False
    got, first = answered(engine, arrive(engine))
    assert got == [want(i) for i in range(N)] and first == [1] * N


def test_a_pool_that_shows_nothing_is_no_harm(start):
    engine = start(pool=False)
    stored(engine)
    got, first = answered(engine, arrive(engine))
    assert got == [want(i) for i in range(N)] and first == [1] * N


def test_what_is_cached_is_not_asked_for(start):
    engine = start()
    stored(engine)
    engine.pool.cached = set(keys(2))
    requests = arrive(engine, 4)
    seen = []
    link, call = engine.scheduler.scheduler.link, engine.scheduler.scheduler.link.call
    link.call = lambda timeout, **fields: seen.extend((q.request, q.computed) for q in fields.get("ahead", ())) or call(timeout, **fields)

    def over():
        got = [engine.scheduler.get_num_new_matched_tokens(r, min(1 + i, 2) * BLOCK_TOKENS) for i, r in enumerate(requests)]
        engine.step()
        return got if all(n is not None for n, _ in got) else None

    got = until(over, "a request has no answer")
    assert got == [want(i, min(1 + i, 2) * BLOCK_TOKENS) for i in range(4)]
    assert seen[:3] == [(f"w{i}", 2 * BLOCK_TOKENS) for i in (1, 2, 3)]
    until(over, "a request has no answer")  # again, if there was news of one that was answered meanwhile
    # More is cached once another request has computed it, and less once blocks were given away.
    calls = Calls(engine)
    assert engine.scheduler.get_num_new_matched_tokens(requests[3], 3 * BLOCK_TOKENS) == (BLOCK_TOKENS, True)
    assert calls.take() == []
    until(lambda: engine.scheduler.get_num_new_matched_tokens(requests[3], BLOCK_TOKENS) == (3 * BLOCK_TOKENS, True), "no answer")
    assert calls.take()
    tracked = engine.scheduler.scheduler.requests["w3"]
    tracked.memo, tracked.memo_tokens = (BLOCK_TOKENS, len(tracked.request.block_hashes)), BLOCK_TOKENS
    tracked.memo_until = time.monotonic() + LIMIT
    asked = [tracked.remembers(n * BLOCK_TOKENS, time.monotonic()) for n in range(5)]
    assert asked == [False, True, True, False, False], "an answer says nothing of blocks before its question, or behind its end"


def test_as_many_come_along_as_vllm_asks_about(start):
    engine = start()
    stored(engine)
    requests = arrive(engine, 8)
    scheduler = engine.scheduler.scheduler
    ahead, life = scheduler.ahead, scheduler.link.life
    tracked = [scheduler.requests[r.request_id] for r in requests]

    def along(n):
        ahead.asked(tracked[n])
        return [t.id for t, _ in ahead.take(tracked[n], life, 0.0)]

    ahead._last = 0
    assert along(0) == [], "nobody knows whether vLLM gets past it"
    assert along(1) == ["w2"]
    ahead.asked(tracked[2])
    assert along(3) == ["w4", "w5", "w6"]
    ahead.pass_over()
    assert along(0) == ["w1", "w2", "w3"], "it asked about four in its last pass, and they wait still"
    ahead.admitted(tracked[0])
    ahead.pass_over()
    for _ in range(3):
        ahead.pass_over()  # it asks about nobody
        assert along(1) == [], "it admitted one in its last pass, and asked about no other"
        ahead.pass_over()


def test_news_make_one_call_of_all(start, monkeypatch):
    engine = start()
    stored(engine)
    monkeypatch.setattr("kvport_vllm.scheduler._ASK_AGAIN", LIMIT)
    scheduler, plugin = engine.scheduler.scheduler, engine.worker.worker.link._fence.pids[-1]
    requests = arrive(engine)
    calls = Calls(engine)
    strike(plugin, signal.SIGSTOP)
    assert ask(engine, requests[:1]) == [(None, False)]
    assert calls.take() == [N]
    os.kill(plugin, signal.SIGCONT)
    engine.step()
    deep(engine)
    until(lambda: scheduler.poll() or all(t.memo is None for t in scheduler.requests.values()), "the agent does not say that it knows")
    answered(engine, requests)
    assert calls.take()[:1] == [N]
    assert answered(engine, requests)[0] == [want(i) for i in range(N)]


def test_what_ended_is_not_asked_about(start):
    engine = start()
    stored(engine)
    requests = arrive(engine)
    finish(engine, requests[3], "FINISHED_ABORTED")
    park(engine, requests[4], [9], 0)  # admitted, and computes
    got, first = answered(engine, requests[:3] + requests[5:])
    assert first[0] == N - 2 and got == [want(i) for i in range(N) if i not in (3, 4)]
    scheduler = engine.scheduler.scheduler
    assert engine.scheduler.reset_cache() is True
    assert all(tracked.memo is None for tracked in scheduler.requests.values()), "what was answered before a reset"
    until(lambda: engine.step() and ask(engine, requests[2:3]) == [(0, False)], "the store is empty")


def test_preempted_requests_wait_again(start):
    engine = start()
    stored(engine)
    requests = arrive(engine, 3)
    for i, r in enumerate(requests[:2]):
        park(engine, r, [9 + i], 0)
    engine.step(preempted=["w0", "w1"])
    deep(engine)
    got, first = answered(engine, requests)
    assert first[0] == 3 and got == [want(i) for i in range(3)]


@pytest.mark.parametrize("victim", ["agent", "plugin"])
def test_a_stopped_process_is_waited_for_once(start, monkeypatch, victim):
    engine = start()
    stored(engine)
    monkeypatch.setattr("kvport_vllm.scheduler._MATCH_WAIT", 0.05)
    monkeypatch.setattr("kvport_vllm.scheduler._ASK_AGAIN", LIMIT)
    fence = engine.worker.worker.link._fence
    pid = fence.pids[0] if victim == "agent" else fence.pids[-1]
    requests = arrive(engine)
    calls = Calls(engine)
    strike(pid, signal.SIGSTOP)
    assert ask(engine, requests) == [(None, False)] * N
    assert calls.take() == [N]
    if victim == "agent":  # what it had no time for, it has no time for again: who is asked about is looked up alone
        for tracked in engine.scheduler.scheduler.requests.values():
            tracked.memo, tracked.ask_again = None, 0.0
            engine.scheduler.scheduler.ahead.wait(tracked)
        deep(engine)
        assert ask(engine, requests[:1]) == [(None, False)]
        assert calls.take() == [1]
    os.kill(pid, signal.SIGCONT)
    got, _ = answered(engine, requests)
    assert got == [want(i) for i in range(N)]


def test_a_new_agent_is_asked_anew(start):
    engine = start()
    stored(engine)
    requests = arrive(engine)
    answered(engine, requests)
    links = [side.link for side in (engine.scheduler.scheduler, engine.worker.worker)]
    before = links[0].life
    os.kill(links[0]._fence.pids[0], signal.SIGKILL)
    until(lambda: engine.step() and all(n.state is State.UP and n.life != before for n in links), "no new agent")
    deep(engine)
    got, first = answered(engine, requests)
    assert got == [want(i) for i in range(N)] and first[0] == N


def test_no_request_is_twice_in_a_call(start):
    engine = start()
    requests = arrive(engine, 3)
    scheduler = engine.scheduler.scheduler
    scheduler.flush()
    tracked = scheduler.requests["w0"]
    tracked.later_since, tracked.ask_again = time.monotonic(), time.monotonic() + LIMIT
    link, poll, call, seen = scheduler.link, scheduler.link.poll, scheduler.link.call, []
    news = message("AgentEvent")(kind=ANSWERED, request="w0")
    link.poll = lambda: [*poll(), news]

    def spy(timeout, **fields):
        seen.append([q.request for q in (fields["match"], *fields.get("ahead", ()))])
        return call(timeout, **fields)

    link.call = spy
    ask(engine, requests[:1])
    assert seen == [["w0", "w1", "w2"]]


def test_an_agent_that_answers_nothing_ahead_is_asked_one_by_one(start):
    engine = start()
    requests = arrive(engine, 3)
    link, call = engine.scheduler.scheduler.link, engine.scheduler.scheduler.link.call

    def alone(timeout, **fields):
        answer = call(timeout, **fields)
        answer.ClearField("ahead")
        return answer

    link.call = alone
    calls = Calls(engine)
    ask(engine, requests[:1])
    for tracked in engine.scheduler.scheduler.requests.values():
        engine.scheduler.scheduler.ahead.wait(tracked)
    ask(engine, requests[1:2])
    assert calls.take() == [3, 1]


def test_a_ticket_does_not_come_ahead(start):
    engine = start()
    requests = arrive(engine, 3)
    engine.scheduler.scheduler.requests["w1"].ticket = b"ticket"
    calls = Calls(engine)
    ask(engine, requests[:1])
    assert calls.take() == [2]


def test_a_pool_that_is_another_one_is_looked_into_once():
    looks = []

    def look(block_hash):
        looks.append(block_hash)

    pins = Pins()
    pins.bind(types.SimpleNamespace(touch=None, free_blocks=None, blocks=[], get_cached_block=look))
    assert pins.leading(keys(2), 2) is None
    pins.pool.get_cached_block = lambda block_hash, groups: looks.append(block_hash)
    assert pins.leading(keys(2), 2) is None
    assert looks == []


def test_where_it_can_be_told_what_vllm_has_cached():
    full = fakes.FullAttentionSpec(block_size=16, sliding_window=None)
    window = fakes.SlidingWindowSpec(block_size=16, sliding_window=33)

    def told(*specs, speculation=None):
        cache = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec) for spec in specs])
        return foreseeable(types.SimpleNamespace(speculative_config=speculation), cache)

    assert told(full) and told(full, speculation=types.SimpleNamespace(use_eagle=lambda: False))
    assert not any((told(window), told(full, window), told(types.SimpleNamespace(kv_cache_specs={"a": full, "b": window}))))
    assert not told(full, speculation=types.SimpleNamespace(use_eagle=lambda: True)), "the last cached block is computed again"
    assert not told(full, speculation=types.SimpleNamespace())
