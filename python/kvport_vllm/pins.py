"""Blocks that must not be given away while a plugin may read them.

vLLM's pool counts references, so a pin is one more of them. Where the pool is out of reach, the
request that owns the blocks is kept instead: see Delayed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

log = logging.getLogger("vllm.kvport")


class Pins:
    """References that this connector holds, by what they are for. Each is dropped exactly once."""

    def __init__(self) -> None:
        """Begin without a pool; bind gives one."""
        self.pool: Any = None
        self._blind = False  # the pool does not show what it has cached
        self._held: dict[Hashable, list[Any]] = {}

    def bind(self, pool: Any) -> None:
        """Take vLLM's BlockPool, if it is one that counts references."""
        if all(hasattr(pool, name) for name in ("touch", "free_blocks", "blocks")):
            self.pool = pool

    @property
    def can_evict(self) -> bool:
        """Say whether blocks can be made unfindable for other requests."""
        return hasattr(self.pool, "evict_blocks")

    def evict(self, ids: Iterable[int]) -> None:
        """Make blocks unfindable: their bytes are not what their hashes say."""
        self.pool.evict_blocks(set(ids))

    def leading(self, hashes: Sequence[bytes], most: int) -> int | None:
        """Count the leading blocks that the pool has cached, up to most of them; None: it does not show them."""
        look = getattr(self.pool, "get_cached_block", None)
        if look is None or self._blind:
            return None
        try:
            return sum(1 for _ in itertools.takewhile(lambda h: look(h, [0]), itertools.islice(hashes, most)))
        except Exception as err:  # of another vLLM
            log.warning("kvport: what vLLM has cached is not to be seen (%s): requests are looked up one by one", err)
            self._blind = True
            return None

    def add(self, key: Hashable, ids: Iterable[int]) -> None:
        """Hold blocks for a purpose, which may hold some already."""
        if self.pool is None:
            self._held.setdefault(key, [])
            return
        blocks = [self.pool.blocks[i] for i in ids]
        self.pool.touch(blocks)
        self._held.setdefault(key, []).extend(blocks)

    def move(self, old: Hashable, new: Hashable, keep: set[int] | None = None) -> None:
        """Go on holding for another purpose, of keep only where it is given."""
        blocks = self._held.pop(old, None)
        if blocks is None:
            return
        if keep is not None:
            self._free([b for b in blocks if b.block_id not in keep])
            blocks = [b for b in blocks if b.block_id in keep]
        self._held.setdefault(new, []).extend(blocks)

    def drop(self, key: Hashable) -> None:
        """Let go of what is held for a purpose; nothing if nothing is."""
        blocks = self._held.pop(key, None)
        if blocks:
            self._free(blocks)

    def keep(self, key: Hashable) -> None:
        """Hold for good what is held for a purpose: nobody waits for its end any more."""
        self._held.pop(key, None)

    def _free(self, blocks: list[Any]) -> None:
        if blocks and self.pool is not None:
            # The last block of a prefix first, as vLLM frees: it is the first to be evicted.
            self.pool.free_blocks(reversed(blocks))

    def drop_all(self) -> None:
        """Let go of everything."""
        for key in list(self._held):
            self.drop(key)

    def __len__(self) -> int:
        """Count purposes for which blocks are held."""
        return len(self._held)

    def __contains__(self, key: Hashable) -> bool:
        """Say whether something is held for a purpose."""
        return key in self._held

    @property
    def blocks(self) -> int:
        """Count blocks held."""
        return sum(len(b) for b in self._held.values())


class Delayed:
    """Ended requests that keep their blocks until nothing reads them: for engines without a pool to pin in."""

    def __init__(self) -> None:
        """Begin with none."""
        self._open: dict[str, int] = {}  # saves under way, by request
        self._kept: set[str] = set()  # requests one of whose saves or holds never ends
        self._waiting: set[str] = set()  # ended
        self._over: list[str] = []

    def began(self, request: str) -> None:
        """Note a save."""
        self._open[request] = self._open.get(request, 0) + 1

    def ended(self, request: str) -> None:
        """Note the end of a save, or of a hold."""
        left = self._open.get(request, 0) - 1
        if left > 0:
            self._open[request] = left
            return
        self._open.pop(request, None)
        if request in self._waiting:
            self._waiting.discard(request)
            self._over.append(request)

    def busy(self, request: str) -> bool:
        """Say whether a request's blocks are being read, by somebody whose end is worth waiting for."""
        return request in self._open

    def wait(self, request: str) -> bool:
        """Keep an ended request's blocks if they are being read."""
        if request in self._kept:
            return True
        if request not in self._open:
            return False
        self._waiting.add(request)
        return True

    def keep(self, request: str) -> None:
        """Note that a save, or a hold, never ends: the request keeps its blocks for good."""
        self._kept.add(request)
        self._waiting.discard(request)
        self.ended(request)  # nobody waits for it

    def end_all(self) -> None:
        """Note that nothing is read any more, except what never ends."""
        self._open.clear()
        self._over += sorted(self._waiting)
        self._waiting.clear()

    def take(self) -> list[str]:
        """Give the requests whose blocks are free now, once each."""
        over, self._over = self._over, []
        return over

    def __len__(self) -> int:
        """Count requests that wait, or are to be told."""
        return len(self._waiting) + len(self._over)
