"""Judges the connector from outside: by what it answers to vLLM, by what it tells the agent, and by what it hears.

Numbers are those of docs/spec/vllm-invariants.md.
"""

from engine import BLOCK_TOKENS, LAYER_BYTES, LAYERS

from kvport_agent.messages import LOADED, SAVED

RULES = {
    2: "all sides of an engine name the same one",
    4: "blocks lie where the strides say",
    10: "a lookup has no effect and repeats",
    11: "the count lies beyond the local hit and within the request, and the agent is asked the same",
    12: "an answer of the agent is passed on",
    13: "nothing is not asynchronous",
    16: "an offer leaves a token to compute",
    18: "no load without external tokens",
    19: "one load for each allocation with external tokens",
    20: "a load begins at the last local hit",
    21: "no load of what was offered and not allocated",
    24: "every step makes metadata",
    25: "blocks that are saved are those of the request's table",
    29: "blocks are offered when they are computed",
    32: "blocks are held until nothing reads them",
    33: "a request is reported at most once, and only if it was handed out",
    34: "a load is reported when it is over, neither before nor later",
    36: "blocks of an ended request are free when all their saves are over",
    37: "failed blocks are reported with the end of their load",
    38: "the worker hears of every load",
    40: "no report for a request that does not wait",
    45: "no offer after a load that left nothing",
    48: "a request ends once, with the tokens that are computed",
    49: "blocks that are kept are freed, and blocks that are read are kept",
    54: "nothing is pending when the engine has come to rest",
    55: "a key stands for the block's whole prefix",
    63: "loaded blocks hold what was saved",
}


class BrokenError(AssertionError):
    """A rule that the connector has broken."""

    def __init__(self, number, text):
        super().__init__(f"invariant {number} ({RULES[number]}): {text}")
        self.number = number


class Judge:
    """Sees every message between the connector and its agent. The player tells it what vLLM does."""

    def __init__(self, engine, chain, slow=False):
        self.engine, self.chain = engine, chain  # chain: keys of a request's full blocks
        self.slow, self.late = slow, []  # slow: the scheduler hears of saves that are over when nothing else is to be done
        self.broken = []
        self.checks = 0
        self.asked = None  # the lookup under way: request, computed, tokens
        self.answered = None  # the agent's answer to it, in tokens
        self.ends = {}  # where what the agent offered last ends, by request
        self.wanted = {}  # loads of allocated requests, until the agent hears of them: first block, ids
        self.handed = {}  # loads until the worker hears of them
        self.bound = {}  # loads that the worker knows of: ids
        self.ended_loads = {}  # failed blocks of loads that are over and not reported
        self.saving = []  # (step, request, ids)
        self.given_away = set()  # ended requests whose blocks nobody holds
        self.allocated = set()  # requests that got blocks since they were last looked up
        self.arrived, self.ended = set(), {}  # ended: by request, what its end may say
        self.attached()
        self._spy(engine.scheduler.scheduler.link, self.heard_by_scheduler)
        self._spy(engine.worker.worker.link, self.heard_by_worker)

    def _spy(self, link, hear):
        send, call, take = link.send, link.call, link._take

        def spy_send(**fields):
            if "step" in fields:
                self.sent(fields["step"])
            return send(**fields)

        def spy_call(timeout, **fields):
            if "match" in fields:
                self.query(fields["match"])
                for query in fields.get("ahead", ()):
                    self.keys(query.request, 0, query.keys)
            answer = call(timeout, **fields)
            if answer is not None and answer.WhichOneof("result") == "match" and not answer.match.later:
                self.answered = answer.match.tokens
            if answer is not None and answer.WhichOneof("result") == "match":
                questions = [fields["match"], *fields.get("ahead", ())]
                for question, match in zip(questions, (answer.match, *answer.ahead), strict=False):
                    if not match.later:
                        self.ends[question.request] = question.computed + match.tokens
            return answer

        def deliver(answer):
            take(answer)
            if answer.WhichOneof("result") == "event":
                hear(answer.event)

        def spy_take(answer):
            if self.slow and answer.WhichOneof("result") == "event" and answer.event.kind == SAVED:
                self.late.append(lambda: deliver(answer))
            else:
                deliver(answer)

        link.send, link.call, link._take = spy_send, spy_call, spy_take

    def release(self):
        """Let the scheduler hear of the saves that are over."""
        late, self.late = self.late, []
        for deliver in late:
            deliver()

    def attached(self):
        """Check what both sides said of themselves when they attached."""
        worker, scheduler = (side.link._attach()[0] for side in (self.engine.worker.worker, self.engine.scheduler.scheduler))
        self.need(2, worker.engine == scheduler.engine != "", f"engines {worker.engine!r} and {scheduler.engine!r}")
        covered = 0
        pieces = sorted(
            (s.offset + block * s.block_stride, s.bytes) for s in worker.layout.segments for block in range(worker.layout.blocks)
        )
        for at, n in pieces:
            self.need(4, at == covered, f"bytes {at} to {at + n} follow byte {covered}")
            covered = at + n
        self.need(4, covered == LAYERS * LAYER_BYTES * self.engine.blocks, f"the layout ends at byte {covered}")

    def need(self, number, fine, text):
        """Note a broken rule: hooks catch what is raised inside of them, so settle raises it."""
        self.checks += 1
        if not fine:
            self.broken.append(BrokenError(number, text))

    def settle(self):
        """Raise what was broken since the last call."""
        if self.broken:
            raise self.broken[0]
        assert self.engine.faults() == {}

    # -- lookups

    def query(self, query):
        if self.asked is None:
            return
        request, computed, tokens = self.asked
        same = (query.request, query.computed, query.tokens) == (request, computed, tokens)
        self.need(11, same, f"the agent is asked for {query.request} from token {query.computed} of {query.tokens}")
        self.keys(request, 0, query.keys)

    def keys(self, request, first, joined):
        got = [joined[i : i + 32] for i in range(0, len(joined), 32)]
        self.need(55, got == self.chain(request)[first : first + len(got)], f"keys of {request} from block {first}")

    def answer(self, request, computed, tokens, got, denied):
        offered, asynchronous = got
        if offered is None:
            self.need(12, self.answered is None, f"request {request} is to ask again, the agent has answered")
            return
        fine = offered >= 0 and computed + offered <= tokens
        self.need(11, fine, f"{offered} tokens beyond {computed} of {tokens} for {request}")
        self.need(13, offered != 0 or not asynchronous, f"nothing, asynchronously, for {request}")
        self.need(16, offered <= 0 or computed + offered < tokens, f"request {request} is left nothing to compute")
        self.need(45, not (denied and offered), f"request {request} is offered {offered} tokens again")
        within = offered <= 0 or computed + offered <= self.ends.get(request, 0)
        self.need(11, within, f"{offered} tokens beyond {computed} for {request}, more than the agent offered")

    # -- what the agent is told

    def sent(self, step):
        for query in step.arrived:
            self.arrived.add(query.request)
            self.keys(query.request, 0, query.keys)
        for load in step.admitted:
            self.admitted(load)
        for save in step.computed:
            self.offered(step.id, save)
        for end in step.ended:
            self.end(end)

    def admitted(self, load):
        request, ids = load.request, list(load.blocks.ids)
        if request not in self.allocated:
            self.need(21, False, f"a load of {request}, which got no blocks")
        elif request not in self.wanted:
            self.need(18 if request not in self.handed else 19, False, f"a load of {request}, which wants none")
        else:
            first, want = self.wanted.pop(request)
            self.handed[request] = want
            right = (getattr(load, "from"), ids) == (first * BLOCK_TOKENS, want)
            self.need(20, right, f"a load of {request} into blocks {ids}, want {want}")
            self.keys(request, first, load.blocks.keys)

    def offered(self, step, save):
        request, ids = save.request, list(save.blocks.ids)
        first = getattr(save, "from") // BLOCK_TOKENS
        table = self.engine.tables[request][first : first + len(ids)]
        self.need(25, ids == table, f"blocks {ids} of {request} are saved, its table has {table}")
        self.keys(request, first, save.blocks.keys)
        self.need(49, request not in self.given_away, f"blocks of {request} are saved, and were given away with its end")
        chain = self.chain(request)
        written = all(self.engine.holds(b, chain[first + i]) for i, b in enumerate(ids) if first + i < len(chain))
        self.need(29, written, f"blocks {ids} of {request} are offered before they are computed")
        self.saving.append((step, request, ids))

    def end(self, end):
        tokens = self.ended.pop(end.request, None)
        self.need(48, tokens is not None, f"the end of {end.request}, which has not ended, or is told twice")
        self.need(48, tokens is None or end.tokens <= tokens, f"{end.request} ends with {end.tokens} tokens, computed are {tokens}")

    # -- what it says

    def heard_by_scheduler(self, event):
        if event.kind == SAVED:
            mine = [s for s in self.saving if s[:2] == (event.step, event.request) and set(event.blocks) <= set(s[2])]
            assert mine, f"the end of a save of {event.request} that nobody began"
            self.saving.remove(mine[0])

    def heard_by_worker(self, event):
        if event.kind == LOADED:
            self.ended_loads[event.request] = set(event.failed)

    def reads(self, request):
        return {b for _, r, ids in self.saving if r == request for b in ids}

    def held(self):
        """Check the pins: vLLM would give away any other block."""
        pool = self.engine.pool
        loose = {b for _, _, ids in self.saving for b in ids if pool.blocks[b].ref_cnt == 0} if self.pinned else ()
        self.need(32, not loose, f"blocks {sorted(loose)} are being saved, and nothing holds them")

    @property
    def pinned(self):
        return self.engine.scheduler.scheduler.pins.pool is not None

    # -- steps

    def built(self, meta, preempted):
        self.need(24, meta is not None, "a step without metadata")
        self.need(19, not self.wanted, f"loads that were not begun: {sorted(self.wanted)}")
        loads = {} if meta is None else {load.request: load.blocks[0] for load in meta.loads}
        self.need(38, not self.handed or loads == self.handed, f"the worker hears of loads {loads}, begun are {self.handed}")
        self.bound.update(self.handed)
        self.handed = {}
        if not self.pinned:
            busy = [r for r in preempted if self.reads(r)]
            self.need(32, not busy, f"preempted while they are being saved: {busy}")
        self.held()

    def reported(self, received, invalid, failed, running):
        for request in sorted(received):
            self.need(40, request not in running, f"the end of a load of {request}, which runs")
            self.need(33, request in self.bound, f"the end of a load of {request}, which has none")
            self.need(34, request in self.ended_loads, f"the load of {request} is reported before it is over")
        over = {r for r in self.ended_loads if r in self.bound}
        lost = sorted(over - set(received))
        self.need(34, not lost, f"loads are over and not reported: {lost}")
        want = set().union(*(self.ended_loads[r] for r in over))
        self.need(37, invalid == want and not failed, f"blocks {sorted(invalid)} could not be loaded, the agent says {sorted(want)}")
        for request in received:
            self.bound.pop(request, None)
            self.ended_loads.pop(request, None)

    def sending(self, requests, kept):
        for request in sorted(requests):
            self.need(33, request in kept, f"the blocks of {request} are not kept")
            self.need(36, not self.reads(request), f"blocks of {request} are free while they are being saved")

    def finished(self, request, delay):
        if not (delay or self.pinned):
            self.need(49, not self.reads(request), f"blocks of {request} are given away while they are being saved")
            self.given_away.add(request)

    def rest(self, kept):
        """Check an engine that has nothing to do: all saves are over, and no load is wanted."""
        busy = self.engine.scheduler.has_pending_push_work()
        self.need(49, busy or not kept, f"blocks are kept for ever: {sorted(kept)}")
        self.need(54, not busy, "no save is under way, and something is pending")
        self.need(54, not self.pinned or self.engine.pool.pinned == 0, "no save is under way, and blocks are held")
        waiting = sorted(set(self.ended) & self.arrived)
        self.need(54, not waiting, f"the agent was not told of the end of {waiting}")
