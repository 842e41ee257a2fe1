"""The scheduler's side: what vLLM decides becomes Steps, what the agent answers becomes decisions."""

from __future__ import annotations

import logging
import time
from typing import Any

from kvport_agent.link import IDLE_WAIT, LATE, LISTEN_EVERY, Link, State
from kvport_agent.messages import ANSWERED, FINISHED, LOST, RELEASED, SAVED, message

from .ahead import MOST_HASHES, Ahead
from .events import Events
from .keys import KEY_BYTES, Keys
from .lora import Adapters
from .meta import UNSENT, Load, StepMetadata
from .pace import Pace
from .pins import Delayed, Pins
from .saving import Saving
from .stats import Counters
from .tracking import Tracked, can_be_named, params_with, ticket_of, wants_remote

log = logging.getLogger("vllm.kvport")

_MATCH_WAIT = 0.005  # of a lookup: the scheduler stands still meanwhile
_ASK_AGAIN = 0.1  # after this long without an answer
_LATER_SLACK = 8.0  # beyond the host's own limit of a lookup: a stuck agent must not park a request for ever
_MEMO = 0.02  # how long an answer to the very same question is good
_FINISH_WAIT = 3.0  # for a ticket
_RESET_WAIT = 10.0
# Of requests that arrive or end in one Step. An agent takes 16 MiB and 16,384 requests of a kind, and ends a connection that brings more.
_STEP_HASHES = 1 << 17
_STEP_REQUESTS = 1 << 12
_FEW_HASHES = 32  # of the first lookup with others after one that had no answer in time
_PREEMPT_WAIT = 1.0  # for saves of preempted requests, where they cannot be pinned

MISS: tuple[int, bool] = (0, False)


class SchedulerSide:
    """All of the connector that lives beside vLLM's scheduler. Used by its thread alone."""

    def __init__(self, link: Link, block_tokens: int, groups: int, adapters: Adapters, events: Events) -> None:
        """Take the connection, the tokens of a block and the number of KV cache groups."""
        self.may_wait = False  # steps for their loads
        self.by_layer = False  # one layer after the other
        self.lossy = False  # nobody can verify what is loaded
        self.later_limit = 2.0 + _LATER_SLACK
        self.pace = Pace()
        self.link = link
        self.adapters = adapters
        self.pins = Pins()
        self.delayed = Delayed()
        self.counters = Counters()
        self.events = events
        self.requests: dict[str, Tracked] = {}
        self.loading: dict[str, Load] = {}  # until vLLM reports it over
        self._behind: dict[str, list[int]] = {}  # by request whose step waits for its load: its blocks from there on
        self.saving = Saving(block_tokens, groups, self.pins, self.delayed, events)
        self.ahead = Ahead(self.pins, block_tokens)
        self._block_tokens = block_tokens
        self._step_type = message("Step")
        self._step = self._step_type()
        self._dirty = False  # the Step holds something
        self._step_hashes = 0  # of requests that it says arrived
        self._step_id = 0
        self._new_loads: list[Load] = []
        self._life = 0  # of the agent that knows our requests
        self._lost = 0
        self._unheard = 0  # steps since the agent was listened to
        self._most = MOST_HASHES  # of a lookup with others: none after one without an answer in time, then more from call to call

    def allow_later(self, seconds: float) -> None:
        """Take the host's own limit of a lookup that has no answer yet."""
        self.later_limit = seconds + _LATER_SLACK

    def begin(self) -> None:
        """Begin with the agent that is there: connections lost before had nothing of ours, and what has come is of this one."""
        self._lost = self.link.lost

    # -- requests come

    def new_request(self, request: Any) -> None:
        """Note a request; the agent hears of it with the next Step, and may look ahead. One that cannot be named stays local."""
        if not can_be_named(request):
            return
        params = getattr(request, "kv_transfer_params", None)
        tracked = Tracked(request, request.request_id, self._keys(request), ticket_of(params), wants_remote(params))
        self.requests[tracked.id] = tracked
        self.ahead.wait(tracked)
        if self.link.life:
            self._arrive(tracked)

    def _keys(self, request: Any) -> Keys | None:
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return Keys()
        try:
            content = self.adapters.content(adapter)
        except OSError as err:
            log.warning("kvport: adapter %s cannot be read (%s): its requests stay local", adapter.lora_name, err)
            return None
        return Keys(content) if content is not None else None

    def _arrive(self, tracked: Tracked) -> None:
        if tracked.keys is None or tracked.told == self.link.life:
            return  # without its adapter's content it has no keys: it comes later, or never
        tracked.told = self.link.life
        self._make_room(len(tracked.request.block_hashes))
        self._step.arrived.append(self._query(tracked, 0))
        if not tracked.waits:
            tracked.query = None  # vLLM asks about it no more: a new agent hears of it
        self._dirty = True

    def _make_room(self, hashes: int = 0) -> None:
        """Send the Step if it cannot take another request that has so many hashes."""
        requests = len(self._step.arrived) + len(self._step.ended)
        if self._step_hashes + hashes > _STEP_HASHES or requests >= _STEP_REQUESTS:
            self.flush()
        self._step_hashes += hashes

    def _query(self, tracked: Tracked, computed: int) -> Any:
        """Give the question about a request, which is kept while it waits: vLLM asks the same again and again."""
        query, request = tracked.query, tracked.request
        if query is None:
            query = tracked.query = message("Query")(request=tracked.id, ticket=tracked.ticket)
        query.tokens, query.computed = request.num_tokens, computed
        if tracked.keys is not None and len(query.keys) != KEY_BYTES * len(request.block_hashes):
            query.keys = tracked.keys.joined(request.block_hashes)
        return query

    # -- lookups

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Answer get_num_new_matched_tokens: tokens beyond computed, loaded asynchronously unless a step waits."""
        if getattr(request, "skip_reading_prefix_cache", False) or not self._loads():
            return MISS
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            self.new_request(request)
            tracked = self.requests.get(request.request_id)
        if tracked is None:
            return MISS  # it cannot be named
        if tracked.denied or (tracked.keys is None and not self._adapter_known(tracked)):
            return MISS if tracked.denied or not tracked.usable else (None, False)
        tracked.asked_at = computed
        now = time.monotonic()
        self.ahead.asked(tracked)
        if (tracked.later_since and now < tracked.ask_again) or tracked.memo_tokens is None:
            self.poll()  # "later" is not said of whom there is news by now
        if tracked.later_since and now < tracked.ask_again:
            return None, False
        if tracked.remembers(computed, now):
            return self._recall(tracked, computed, now)
        return self._ask(tracked, (computed, len(request.block_hashes)), now)

    def _loads(self) -> bool:
        if self.link.life == 0:
            self.poll()
        return self.link.life != 0 and bool(self.link.attached.loads)

    def _adapter_known(self, tracked: Tracked) -> bool:
        try:
            content = self.adapters.content(tracked.request.lora_request)
        except OSError:
            tracked.usable = False
            return False
        if content is None:
            return False
        tracked.keys = Keys(content)
        self._arrive(tracked)
        return True

    def _ask(self, tracked: Tracked, question: tuple[int, int], now: float) -> tuple[int | None, bool]:
        if self.link.life == 0:
            return MISS
        query = self._query(tracked, question[0])
        self.counters.add("kvport_shim_lookups_total")
        others = self.ahead.take(tracked, self.link.life, now, self._most) if self.link.attached.ahead else []
        if others:
            self.counters.add("kvport_shim_lookups_ahead_total", len(others))
            answer = self.link.call(_MATCH_WAIT, match=query, ahead=[self._query(other, computed) for other, computed in others])
        else:
            answer = self.link.call(_MATCH_WAIT, match=query)
        self._most = 0 if answer is None else min(MOST_HASHES, max(_FEW_HASHES, 2 * self._most))
        if self.link.life == 0:
            return MISS
        if others:
            self._foretell(others, answer, now)
        if answer is None or answer.match.later:
            return self._later(tracked, now)
        tracked.later_since = 0.0
        if answer.WhichOneof("result") != "match":
            return MISS
        return self._offer(tracked, self._remember(tracked, question[0], answer.match, now))

    def _foretell(self, others: list[tuple[Tracked, int]], answer: Any, now: float) -> None:
        """Remember what was answered about others. Nobody waits for an agent a second time that was late: no answer is "later".

        But who was answered sooner than the others were is no reason to pass over them: vLLM's own question waits for its answer.
        """
        late = answer is None or answer.match.later
        answers = [None] * len(others) if answer is None else answer.ahead
        for (other, computed), match in zip(others, answers, strict=False):
            if late or not match.later:
                self._remember(other, computed, match, now)
        if answer is not None and not answers and answer.WhichOneof("result") == "match":
            self.ahead.refused(self.link.life)

    def _remember(self, tracked: Tracked, computed: int, match: Any, now: float) -> int:
        """Remember an answer for a moment; none, or one that comes later, too."""
        tokens = None if match is None or match.later else max(0, min(match.tokens, tracked.request.num_tokens - computed))
        tracked.memo, tracked.memo_until, tracked.memo_tokens = (computed, len(tracked.request.block_hashes)), now + _MEMO, tokens
        return tokens or 0

    def _recall(self, tracked: Tracked, computed: int, now: float) -> tuple[int | None, bool]:
        """Answer by the memo. An offer ends where it ends, also for a request of which more is cached by now: so the agent answers."""
        assert tracked.memo is not None
        if tracked.memo_tokens is None:
            return self._later(tracked, now)
        return self._offer(tracked, max(0, tracked.memo[0] + tracked.memo_tokens - computed))

    def _later(self, tracked: Tracked, now: float) -> tuple[int | None, bool]:
        tracked.later_since = tracked.later_since or now
        if now - tracked.later_since > self.later_limit:
            tracked.later_since = 0.0
            self.counters.add("kvport_shim_lookups_given_up_total")
            return MISS
        tracked.ask_again = now + _ASK_AGAIN
        return None, False

    def _offer(self, tracked: Tracked, tokens: int) -> tuple[int, bool]:
        tracked.later_since = 0.0
        if tokens <= 0:
            return MISS
        tracked.at_once = self._at_once(tracked, tokens)
        return tokens, not tracked.at_once

    def _at_once(self, tracked: Tracked, tokens: int) -> bool:
        """Say whether the step that admits a request may wait for its load: see pace."""
        end = tracked.asked_at + tokens
        return (
            self.may_wait
            and len(self.requests) == 1  # nobody is held up, and nobody shares blocks that may turn out bad
            and not self.loading
            and end < tracked.request.num_tokens
            and tracked.asked_at % self._block_tokens == end % self._block_tokens == 0
            and self.pins.can_evict
            and self.pace.quick(tokens // self._block_tokens)
        )

    # -- loads

    def admitted(self, request: Any) -> None:
        """Note that a request was given blocks: vLLM asks about it no more."""
        tracked = self.requests.get(request.request_id)
        if tracked is not None:
            tracked.query = None
            self.ahead.admitted(tracked)

    def allocated(self, request: Any, tables: Any, external: int) -> None:
        """Begin the load of a request that was given blocks; asked again without external tokens, do nothing."""
        if external <= 0:
            return
        # From here on the request is parked, or runs: whatever goes wrong, its load must end.
        tracked = self.requests[request.request_id]
        first = tracked.asked_at // self._block_tokens
        end = -(-(tracked.asked_at + external) // self._block_tokens)
        load = Load(tracked.id, UNSENT, 0, [list(table[first:end]) for table in tables], tracked.at_once, tracked.at_once and self.by_layer)
        self._new_loads.append(load)
        self.loading[load.request] = load
        if load.now:
            self._behind[load.request] = list(tables[0][first:])
            self.counters.add("kvport_shim_loads_in_step_total")
        tracked.memo = None
        transfer = message("Transfer")(request=tracked.id, tokens=external, ticket=tracked.ticket)
        setattr(transfer, "from", tracked.asked_at)
        self.saving.fill(transfer.blocks, tracked, load.blocks, first, tracked.asked_at + external)
        self._step.admitted.append(transfer)
        load.step = 0
        tracked.have = max(tracked.have, (tracked.asked_at + external) // self._block_tokens)
        self._dirty = True

    # -- steps

    def build(self, output: Any) -> StepMetadata:
        """Answer build_connector_meta: send what was decided, and say what the workers must know."""
        self.ahead.pass_over()
        idle = not output.num_scheduled_tokens
        undecided = idle and any(t.later_since for t in self.requests.values())
        if idle and not self.loading and not self._dirty and (undecided or len(self.pins)):
            self.link.wait(IDLE_WAIT)
        self._listen(idle)
        if getattr(output, "preempted_req_ids", None):
            self._preempted(output.preempted_req_ids)
        meta = StepMetadata(sent=self.delayed.take(), idle=idle and not undecided)
        if self.link.life and self.link.attached.saves:
            self.saving.completes(output, self.requests, meta)
        self.flush()
        loads, self._new_loads = self._new_loads, []
        meta.loads = loads
        return meta

    def emergency(self) -> StepMetadata:
        """Answer build_connector_meta when something went wrong: no load may be forgotten."""
        loads, self._new_loads = self._new_loads, []
        return StepMetadata(loads=loads)

    def _listen(self, idle: bool) -> None:
        """Read what has come, if anybody waits for it; the rest can wait in the socket for some steps."""
        self._unheard += 1
        waited_for = idle or self.loading or len(self.pins) or len(self.delayed) or self.link.state is not State.UP
        if waited_for or self._unheard >= LISTEN_EVERY:
            self._unheard = 0
            self.poll()

    def _preempted(self, ids: Any) -> None:
        for request in sorted(ids):
            if request in self.requests:
                self._step.preempted.append(request)
                self.requests[request].memo = None
                self.ahead.wait(self.requests[request])
                self._dirty = True
                if self.lossy:
                    self._starts_over(self.requests[request])
        if self.pins.pool is None:
            self._wait_for_saves(ids)

    def _starts_over(self, tracked: Tracked) -> None:
        """End what a lossy load did to a request: it gets other blocks, which are computed and offered like any others."""
        self.saving.request_over(tracked, self._step, False)  # what it computed belongs to the blocks that it loses
        tracked.have, tracked.unverified, tracked.private = 0, False, False

    def _wait_for_saves(self, ids: Any) -> None:
        # Their blocks are given away in this very step, and nothing holds them.
        deadline = time.monotonic() + _PREEMPT_WAIT
        self.flush()
        while any(self.delayed.busy(r) for r in ids) and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.001)
        if any(self.delayed.busy(r) for r in ids):
            self.link.lose("saves of a preempted request did not end in time")

    def flush(self) -> None:
        """Send the Step if it holds something."""
        if not self._dirty:
            return
        step, self._step, self._dirty, self._step_hashes = self._step, self._step_type(), False, 0
        self._step_id += 1
        step.id = self._step_id
        sent = self.link.send(step=step, layer_wise=[load.request for load in self._new_loads if load.by_layer and load.step == 0])
        for load in self._new_loads:
            if load.step == 0:
                load.step, load.life = step.id, self.link.life if sent else 0
                if load.request in self.requests:
                    self.requests[load.request].load_began = time.monotonic()
                    self.requests[load.request].unverified |= self.lossy and sent
        self.saving.sent(step.id, sent)

    def step_over(self, output: Any) -> None:
        """Take update_connector_output: completed blocks are true now, loads are over."""
        done = getattr(output, "kv_connector_worker_meta", None)
        if done is not None or output.finished_recving:
            self.poll()  # a step that completed nothing is heard of in the next build
        invalid = output.invalid_block_ids or ()
        failed = getattr(output, "failed_recving", None) or ()
        for request in output.finished_recving or ():
            self._load_over(request, invalid, failed)
        if done is not None:
            if done.early:
                self.counters.add("kvport_shim_loads_by_layer_total", done.early)
            if done.whole and self.by_layer:
                self._load_as_a_whole(done.whole)
            for request, seconds in done.waited.items():
                self._waited_for(request, seconds, invalid)
            for ack in sorted(done.acks):
                self._dirty |= self.saving.computed(ack, self._step)
        if self._dirty and done is not None:
            self.flush()

    def _load_as_a_whole(self, why: str) -> None:
        """Ask for no more loads by layer: they are checked twice and tried once, which is for ranks that wait for layers."""
        self.by_layer = False
        self.counters.add("kvport_shim_load_by_layer_off_total")
        log.warning("kvport: load_by_layer is off: %s", why)

    def _waited_for(self, request: str, seconds: float, invalid: Any) -> None:
        """Take the end of a load that its step waited for."""
        blocks, load = self._behind.pop(request, []), self.loading.get(request)
        self._load_over(request, invalid, ())
        bad = next((i for i, b in enumerate(blocks) if b in invalid), None)
        if bad is None:
            self.pace.took(seconds, len(load.blocks[0]) if load is not None else 0)
            return
        # vLLM has given them their hashes, and what the step computed behind them is worth nothing.
        self.pins.evict(blocks[bad:])
        if request in self.requests:
            self.saving.request_over(self.requests[request], self._step, False)

    def _load_over(self, request: str, invalid: Any, failed: Any) -> None:
        load = self.loading.pop(request, None)
        tracked = self.requests.get(request)
        if load is None or tracked is None:
            return
        bad = request in failed or any(b in invalid for ids in load.blocks for b in ids)
        if not bad:
            if not load.now:
                self.pace.took(time.monotonic() - tracked.load_began, len(load.blocks[0]))
            return
        tracked.have = 0
        self.pace.failed()
        first = load.blocks[0][0] if load.blocks and load.blocks[0] else None
        # vLLM asks again at once, and would be offered the same blocks for ever.
        tracked.denied = request in failed or len(load.blocks) > 1 or first in invalid or load.life != self.link.life
        self.counters.add("kvport_shim_loads_failed_total")

    # -- requests go

    def finished(self, request: Any, tables: Any, reason: int, normal: bool) -> tuple[bool, dict[str, Any] | None]:
        """Answer request_finished: whether blocks stay with the request, and what the response says."""
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self.ahead.admitted(tracked)
        computed = max(0, min(request.num_computed_tokens, request.num_tokens - 1)) if normal else 0
        self._dirty |= self.saving.request_over(tracked, self._step, normal)
        params = None
        told = self.link.life != 0 and tracked.told == self.link.life
        if told and tracked.remote and normal and not tracked.private:
            params = self._finish_remote(tracked, tables, reason, computed)
        elif told:
            self._make_room()
            self._step.ended.add(request=tracked.id, reason=reason, tokens=computed)
            self._dirty = True
        delay = self.pins.pool is None and self.delayed.wait(tracked.id)
        return delay, params

    def _finish_remote(self, tracked: Tracked, tables: Any, reason: int, computed: int) -> dict[str, Any] | None:
        self.flush()
        # A partial block has no name, and so no digest by which its consumer could tell whether it is right.
        end = computed // self._block_tokens
        computed = end * self._block_tokens
        ended = message("Ended")(request=tracked.id, reason=reason, tokens=computed, remote=True)
        ids = [list(table[:end]) for table in tables]
        self.saving.fill(ended.blocks, tracked, ids, 0, computed)
        self.saving.hold(tracked.id, ids)
        answer = self.link.call(_FINISH_WAIT, finish=ended)
        if answer is None:
            # Whether it holds blocks we will not hear: the pin stays until Finished, or the agent's end.
            log.warning("kvport: no ticket for request %s within %.0f s", tracked.id, _FINISH_WAIT)
            return None
        if answer.WhichOneof("result") != "finish":
            self.saving.let_go(tracked.id)
            return None
        return params_with(answer.finish.ticket) if answer.finish.ticket else None

    # -- what the agent says

    def poll(self) -> None:
        """Read what has come, without waiting."""
        for event in self.link.poll():
            self._take(event)
        if self.link.lost != self._lost and self.link.state is not State.FENCING:
            self._lost = self.link.lost
            self._forget()
        if self.link.life != self._life:
            self._life = self.link.life
            if self._life:
                self._introduce()

    def _take(self, event: Any) -> None:
        kind = getattr(event, "kind", None)
        if event is LATE:
            self._ask_again()
        elif kind is None:
            self._take_news(event)
        elif kind == SAVED:
            self.saving.saved(event)
        elif (kind == FINISHED and not event.held) or kind == RELEASED:
            self.saving.let_go(event.request)
        elif kind == LOST:
            self.saving.lost(event)
        elif kind == ANSWERED and event.request in self.requests:
            self.requests[event.request].ask_again = 0.0
            self.requests[event.request].memo = None

    def _take_news(self, news: Any) -> None:
        if news.DESCRIPTOR.name == "AgentBlocks":
            self.events.report(news)
        else:
            self.counters.take_state(news)

    def _ask_again(self) -> None:
        """Ask for whoever waits: the agent has answered after we had stopped waiting, and knows the answer still."""
        for tracked in self.requests.values():
            tracked.ask_again, tracked.memo = 0.0, None

    def _forget(self) -> None:
        """Let go of everything that the dead agent had: nothing of it can touch a block any more."""
        self.saving.forget()
        self.delayed.end_all()
        self.counters.agent_lost()
        self.events.agent_lost()
        self._step, self._dirty, self._step_hashes = self._without_history(), bool(self._new_loads), 0
        for tracked in self.requests.values():
            tracked.memo, tracked.later_since, tracked.have, tracked.told = None, 0.0, 0, 0
            tracked.private = tracked.unverified

    def _without_history(self) -> Any:
        step = self._step_type()
        for load, transfer in zip(self._new_loads, self._step.admitted, strict=False):
            if load.step == 0:
                step.admitted.add().CopyFrom(transfer)
        return step

    def _introduce(self) -> None:
        """Tell a new agent of all live requests: each of them will end. Those whose loads it is told of come first."""
        for tracked in sorted(self.requests.values(), key=lambda t: t.id not in self.loading):
            self._arrive(tracked)

    # -- the rest

    def busy(self) -> bool:
        """Say whether the engine must go on stepping: somebody still reads blocks, or is to be told something."""
        self.poll()
        return bool(len(self.pins) or len(self.delayed) or self._dirty)

    def reset(self) -> bool:
        """Empty the connector's cache; False if it is not known to be empty."""
        self.poll()
        for tracked in self.requests.values():
            tracked.memo, tracked.have = None, 0
        answer = self.link.call(_RESET_WAIT, reset=message("ResetRequest")())
        emptied = answer is not None and answer.WhichOneof("result") == "reset" and bool(answer.reset.emptied)
        if emptied:
            self.events.lost()
        return emptied

    def close(self) -> None:
        """Leave; what was held is held no more."""
        self.flush()
        self.link.close()
        self.saving.forget()
        self.adapters.close()
