"""From "this step completes these blocks" to "nobody reads them any more".

A block is offered to the connector once, when the engine step that fills it is over. From the moment
that step is scheduled until the agent says Saved, the block is pinned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .events import Events
from .keys import PARTIAL
from .meta import StepMetadata
from .pins import Delayed, Pins
from .tracking import Completion, Tracked


class Saving:
    """Blocks on their way to the connector."""

    def __init__(self, block_tokens: int, groups: int, pins: Pins, delayed: Delayed, events: Events) -> None:
        """Take what blocks are held by, and where stored ones are published."""
        self._block_tokens = block_tokens
        self._groups = groups
        self._pins = pins
        self._delayed = delayed
        self._events = events
        self._ack = 0
        self._running: dict[int, list[Completion]] = {}  # by ack, of steps that are not over
        self._number = 0  # of the last block run that was offered
        self._unsent: list[tuple[int, Completion]] = []  # in the Step that is sent next
        self._sent: dict[tuple[int, str], dict[int, Completion]] = {}  # by Step and request
        self._holds: set[str] = set()

    # -- scheduled

    def completes(self, output: Any, requests: Mapping[str, Tracked], meta: StepMetadata) -> None:
        """Note and pin the blocks that a step completes. The usual decode step completes none."""
        size = self._block_tokens
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        running: Iterable[tuple[str, int]] = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        if output.scheduled_new_reqs:
            running = itertools.chain(((r.req_id, r.num_computed_tokens) for r in output.scheduled_new_reqs), running)
        if getattr(output, "kv_connector_block_state", None) is None:
            self._keep_tables(output, requests)
        found: list[Completion] = []
        for request, computed in running:
            end = (computed + scheduled[request]) // size
            if end <= computed // size:
                continue
            tracked = requests.get(request)
            if tracked is None or tracked.keys is None or tracked.private:
                continue
            first = max(tracked.have, 0 if tracked.remote else computed // size)
            if first < end and (done := self._completion(output, tracked, first, end)) is not None:
                found.append(done)
        if found:
            self._note(found, meta)

    def _keep_tables(self, output: Any, requests: Mapping[str, Tracked]) -> None:
        for new in output.scheduled_new_reqs:
            self._grow(requests.get(new.req_id), new.block_ids, True)
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None)
        flags = getattr(cached, "resumed_from_preemption", None)
        for i, request in enumerate(cached.req_ids):
            replace = request in resumed if resumed is not None else bool(flags and flags[i])
            self._grow(requests.get(request), cached.new_block_ids[i], replace)

    @staticmethod
    def _grow(tracked: Tracked | None, tables: Any, replace: bool) -> None:
        """Keep the tables that this vLLM does not show: new ids append, those of a resumed request replace."""
        if tracked is None or tables is None:
            return
        if replace or not tracked.tables:
            tracked.tables = [list(t) for t in tables]
            return
        for mine, more in zip(tracked.tables, tables, strict=True):
            mine.extend(more)

    def _completion(self, output: Any, tracked: Tracked, first: int, end: int) -> Completion | None:
        state = getattr(output, "kv_connector_block_state", None)
        tables = state.get_block_ids(tracked.id) if state is not None else None
        if tables is None:
            tables = tracked.tables
        ids = [list(table[first:end]) for table in tables]
        if len(ids) != self._groups or any(len(i) != end - first for i in ids):
            return None
        return Completion(tracked, first, end, ids)

    def _note(self, found: list[Completion], meta: StepMetadata) -> None:
        self._ack += 1
        self._running[self._ack] = found
        meta.ack = self._ack
        meta.completes = [[] for _ in range(self._groups)]
        for done in found:
            self._pins.add(("ack", self._ack, done.tracked.id), self._real(done.ids))
            for mine, more in zip(meta.completes, done.ids, strict=True):
                mine.extend(i for i in more if not self._is_null(i))

    def _is_null(self, block: int) -> bool:
        """Say whether an entry of a table stands for a block that a window has left behind."""
        null = getattr(self._pins.pool, "null_block", None)
        return self._groups > 1 and block == (null.block_id if null is not None else 0)

    def _real(self, ids: Sequence[Sequence[int]]) -> list[int]:
        return [i for table in ids for i in table if not self._is_null(i)]

    # -- computed

    def computed(self, ack: int, step: Any) -> bool:
        """Offer what an engine step completed, now that it is over; say whether that was anything."""
        any_offered = False
        for done in self._running.pop(ack, ()):
            any_offered |= self._offer(ack, done, step)
        return any_offered

    def _offer(self, ack: int, done: Completion, step: Any) -> bool:
        tracked = done.tracked
        request = tracked.request
        # The last token's KV is never there yet, and speculated ones that were refused never count.
        valid = min(done.end, (request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        first = max(done.first, tracked.have)
        key = ("ack", ack, tracked.id)
        if valid <= first:
            self._pins.drop(key)
            return False
        ids = [table[first - done.first : valid - done.first] for table in done.ids]
        offered = Completion(tracked, first, valid, ids)
        transfer = step.computed.add(request=tracked.id, tokens=(valid - first) * self._block_tokens)
        setattr(transfer, "from", first * self._block_tokens)
        self.fill(transfer.blocks, tracked, ids, first, valid * self._block_tokens)
        self._number += 1
        self._pins.move(key, ("save", self._number), set(self._real(ids)))
        self._unsent.append((self._number, offered))
        self._events.offered(offered)
        self._delayed.began(tracked.id)
        tracked.have = valid
        return True

    def request_over(self, tracked: Tracked, step: Any, normal: bool) -> bool:
        """Offer what a request that ended has computed, or forget it; say whether anything was offered.

        vLLM ends requests while it looks at a step's output, before it says that the step is over.
        """
        any_offered = False
        for ack, list_ in list(self._running.items()):
            mine = [done for done in list_ if done.tracked is tracked]
            if not mine:
                continue
            self._running[ack] = [done for done in list_ if done.tracked is not tracked]
            for done in mine:
                if normal:
                    any_offered |= self._offer(ack, done, step)
                else:
                    self._pins.drop(("ack", ack, tracked.id))
        return any_offered

    def sent(self, step: int, ok: bool) -> None:
        """Note the Step in which everything offered went out, if it did."""
        unsent, self._unsent = self._unsent, []
        for number, offered in unsent:
            if ok:
                self._sent.setdefault((step, offered.tracked.id), {})[number] = offered
            else:
                self._pins.drop(("save", number))
                self._delayed.ended(offered.tracked.id)

    # -- saved

    def saved(self, event: Any) -> None:
        """Take the end of a save: the blocks may go, and those that are stored are published."""
        if (number := self._over(event)) is not None:
            self._pins.drop(("save", number))
            self._delayed.ended(event.request)

    def _over(self, event: Any) -> int | None:
        """Say which save an event is the end of, and publish what it stored."""
        mine = self._sent.get((event.step, event.request))
        if not mine:
            return None
        blocks = set(event.blocks)
        number = next((n for n, done in mine.items() if blocks & set(done.ids[0])), next(iter(mine)))
        done = mine.pop(number)
        if not mine:
            del self._sent[event.step, event.request]
        self._events.saved(done, set(event.failed))
        return number

    def lost(self, event: Any) -> None:
        """Keep blocks for good: a dead plugin left somebody behind who may go on using what it saved or held."""
        key: tuple[str, Any] | None = None
        if not event.held:
            number = self._over(event)
            key = None if number is None else ("save", number)
        elif event.request in self._holds:
            self._holds.discard(event.request)
            key = ("hold", event.request)
        if key is not None:
            self._pins.keep(key)
            self._delayed.keep(event.request)

    # -- held for a consumer

    def hold(self, request: str, ids: list[list[int]]) -> None:
        """Pin the blocks of an ended request that a consumer may come for."""
        self._holds.add(request)
        self._pins.add(("hold", request), self._real(ids))
        self._delayed.began(request)

    def let_go(self, request: str) -> None:
        """Let go of them."""
        if request in self._holds:
            self._holds.discard(request)
            self._pins.drop(("hold", request))
            self._delayed.ended(request)

    def forget(self) -> None:
        """Let go of everything: whoever read blocks has ended."""
        self._running.clear()
        self._unsent.clear()
        self._sent.clear()
        self._holds.clear()
        self._pins.drop_all()

    # -- messages

    def fill(self, blocks: Any, tracked: Tracked, ids: Sequence[Sequence[int]], first: int, to: int) -> None:
        """Write columns, group by group. A block that is not full before token to has no key."""
        assert tracked.keys is not None
        hashes = tracked.request.block_hashes
        keys: list[bytes] = []
        numbers: list[int] = []
        groups: list[int] = []
        for group, table in enumerate(ids):
            for i, block in enumerate(table, first):
                if self._is_null(block):
                    continue
                full = (i + 1) * self._block_tokens <= to
                keys.append(tracked.keys.one(hashes, i) if full else PARTIAL)
                numbers.append(block)
                groups.append(group)
        blocks.keys = b"".join(keys)
        blocks.ids.extend(numbers)
        if self._groups > 1:
            blocks.groups.extend(groups)
