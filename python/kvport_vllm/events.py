"""KV events: what the connector has, published as vLLM publishes its own cache.

A block is described when it is offered. It is published when the connector says that it has it or,
where the connector says nothing of its blocks, when its save is over; and taken back when the connector
has it no longer, or nobody can know any more whether it has.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tracking import Completion

STORED, REMOVED, CLEARED = 1, 2, 3  # kinds of BlockEvent
KEY = 32
# Less than the agent and the plugins remember, so that none of them forgets a block that is published.
_MOST = 1 << 16
# What vLLM calls the places that plugins name.
_MEDIA = {"memory": "CPU", "disk": "STORAGE", "remote": "STORAGE"}
_MEDIUM = "kvport"  # of a connector that does not say
_OWN = "GPU"  # of which only vLLM speaks
_MOST_SPOTS = 8  # of one block: a connector names them, and may name a new one each time
_SHARED = 3  # the scope of what every engine sees that reaches the same backend
_Spot = tuple[str, str]  # where blocks are, as vLLM says it: medium and locality, which is empty if nobody knows it


@dataclass(slots=True)
class _Block:
    name: Any  # vLLM's hash, as it is published
    parent: Any
    tokens: array[int]
    adapter: tuple[Any, Any]  # id and name
    extra: Any  # what else it depends on, such as the cache_salt, as vLLM publishes it; None: nothing
    spots: set[_Spot] = field(default_factory=set)  # where it was published


class Events:
    """Events that wait to be taken. Blocks are named by vLLM's own hashes, as its other events are."""

    def __init__(self, block_tokens: int, api: EventApi | None, most: int = _MOST) -> None:
        """Take vLLM's event types, or None where events are switched off, and how many blocks to know."""
        self._block_tokens = block_tokens
        self._api = api
        self._most = most
        self._known: OrderedDict[bytes, _Block] = OrderedDict()  # by key; what was offered last is last
        self._told = False  # the connector tells of its blocks
        self._list: list[Any] = []

    @property
    def wanted(self) -> bool:
        """Say whether anybody reads events."""
        return self._api is not None

    # -- what is saved

    def offered(self, done: Completion) -> None:
        """Keep what an event needs of blocks that go out to be saved: the request may be over by then."""
        if self._api is None or done.tracked.keys is None:
            return
        request, size = done.tracked.request, self._block_tokens
        hashes = request.block_hashes
        adapter = getattr(request, "lora_request", None)
        names = (getattr(adapter, "adapter_id", None), getattr(adapter, "lora_name", None))
        for i in range(done.first, done.end):
            key = done.tracked.keys.one(hashes, i)
            if key in self._known:
                self._known.move_to_end(key)
                continue
            parent = self._api.external(hashes[i - 1]) if i else None
            tokens = array("q", request.all_token_ids[i * size : (i + 1) * size])
            extra = self._api.extra(request, i * size, (i + 1) * size)
            self._known[key] = _Block(self._api.external(hashes[i]), parent, tokens, names, extra)
        while len(self._known) > self._most:
            _, block = self._known.popitem(last=False)
            self._remove([block], block.spots)

    def saved(self, done: Completion, failed: set[int]) -> None:
        """Publish the blocks of a save that is over, of a connector that tells nothing itself."""
        if self._api is None or self._told or not done.ids or done.tracked.keys is None:
            return
        hashes = done.tracked.request.block_hashes
        keys = [done.tracked.keys.one(hashes, i) for i, block in enumerate(done.ids[0], done.first) if block not in failed]
        self._store(keys, (_MEDIUM, ""))

    # -- what the connector says

    def report(self, blocks: Any) -> None:
        """Take an AgentBlocks."""
        if self._api is None:
            return
        if blocks.gap:
            self._told = True
            self.lost()
        for event in blocks.events:
            medium = _MEDIUM if event.medium in ("", _OWN) else _MEDIA.get(event.medium, event.medium)
            spot = medium, "REMOTE" if event.scope == _SHARED else "LOCAL"
            keys = [bytes(event.keys[at : at + KEY]) for at in range(0, len(event.keys), KEY)]
            if event.kind == STORED:
                self._store(keys, spot)
            elif event.kind == REMOVED:
                self._remove([b for k in keys if (b := self._known.get(k)) is not None], {spot})
            elif event.kind == CLEARED:
                self.lost()

    def lost(self) -> None:
        """Take everything back: the connector is empty, or nobody knows what it has."""
        by_spot: dict[_Spot, list[_Block]] = {}
        for block in self._known.values():
            for spot in block.spots:
                by_spot.setdefault(spot, []).append(block)
        for spot, blocks in by_spot.items():
            self._remove(blocks, {spot})

    def agent_lost(self) -> None:
        """Take everything back, until the next agent's connector tells."""
        self.lost()
        self._told = False

    # -- vLLM's events

    def _store(self, keys: Sequence[bytes], spot: _Spot) -> None:
        for run in self._runs(keys, spot):
            assert self._api is not None
            self._list.append(
                self._api.stored(
                    block_hashes=[b.name for b in run],
                    parent_block_hash=run[0].parent,
                    token_ids=[t for b in run for t in b.tokens],
                    block_size=self._block_tokens,
                    lora_id=run[0].adapter[0],
                    medium=spot[0],
                    lora_name=run[0].adapter[1],
                    extra_keys=[b.extra for b in run],
                    locality=spot[1] or None,
                )
            )

    def _runs(self, keys: Sequence[bytes], spot: _Spot) -> Iterator[list[_Block]]:
        """Part blocks that are known and were not published yet into runs, each block the parent of the next."""
        run: list[_Block] = []
        for key in keys:
            block = self._known.get(key)
            if block is None or spot in block.spots or len(block.spots) >= _MOST_SPOTS:
                continue
            block.spots.add(spot)
            if run and (block.parent != run[-1].name or block.adapter != run[-1].adapter):
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    def _remove(self, blocks: Sequence[_Block], spots: set[_Spot]) -> None:
        for spot in sorted(spots):
            gone = [b for b in blocks if spot in b.spots]
            for b in gone:
                b.spots.discard(spot)
            if gone and self._api is not None:
                self._list.append(self._api.removed(block_hashes=[b.name for b in gone], medium=spot[0], locality=spot[1] or None))

    def take(self) -> list[Any]:
        """Give the events since the last call."""
        taken, self._list = self._list, []
        return taken


class EventApi:
    """vLLM's event types."""

    def __init__(
        self,
        stored: Callable[..., Any],
        removed: Callable[..., Any],
        external: Callable[[bytes], Any],
        extra: Callable[[Any, int, int], Any],
    ) -> None:
        """Take the makers of BlockStored and BlockRemoved, the public form of a hash, and what a request's tokens depend on."""
        self.stored = stored
        self.removed = removed
        self.external = external
        self.extra = extra


def event_api(vllm_config: Any) -> EventApi | None:
    """Find vLLM's event types, if events are switched on."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not getattr(config, "enable_kv_cache_events", False):
        return None
    from vllm.distributed.kv_events import BlockRemoved, BlockStored  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found,unused-ignore]
        generate_block_hash_extra_keys,
        maybe_convert_block_hash,
        to_event_extra_keys,
    )

    def extra(request: Any, first: int, end: int) -> Any:
        keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
        return to_event_extra_keys([keys])[0]

    return EventApi(BlockStored, BlockRemoved, maybe_convert_block_hash, extra)
