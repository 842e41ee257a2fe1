"""Memory of our own that the agent can read and write, for pages that do not lie in a memfd.

Half of it is for puts and half for gets, so that neither waits for the other. A page is copied into it or out
of it while nobody else uses its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence

from kvport_agent.memfd import Memfd

NUMBER = 1  # of the region; 0 is the pool
_CLOSE_WAIT = 2.0  # seconds for a page that is being copied


class Bounce:
    """Places for pages."""

    def __init__(self, lengths: Sequence[int], pages: int) -> None:
        """Make memory for so many pages, at least one for puts and one for gets."""
        self.lengths = tuple(lengths)
        self._page = sum(lengths)
        self.half = max(1, pages // 2)
        self.memfd: Memfd | None = Memfd(2 * self.half * self._page)
        self._locks = {"put": threading.Lock(), "get": threading.Lock()}

    @contextlib.contextmanager
    def places(self, kind: str, wait: float) -> Iterator[list[int] | None]:
        """Lend the places of one kind of call; None if another such call has them for too long, or they are gone."""
        lock = self._locks[kind]
        if not lock.acquire(timeout=max(0.0, wait)):
            yield None
            return
        try:
            first = 0 if kind == "put" else self.half
            yield None if self.memfd is None else [(first + i) * self._page for i in range(self.half)]
        finally:
            lock.release()

    def offsets(self, place: int) -> list[int]:
        """Say where the parts of a page at a place begin."""
        out, at = [], place
        for length in self.lengths:
            out.append(at)
            at += length
        return out

    def copy_in(self, place: int, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy a page in, from where its parts lie."""
        assert self.memfd is not None
        at = self.memfd.address + place
        for address, length in zip(addresses, lengths, strict=True):
            ctypes.memmove(at, address, length)
            at += length

    def copy_out(self, place: int, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy a page out, to where its parts belong."""
        assert self.memfd is not None
        at = self.memfd.address + place
        for address, length in zip(addresses, lengths, strict=True):
            ctypes.memmove(address, at, length)
            at += length

    def close(self) -> None:
        """Give the memory back; where a page is being copied for too long, only its descriptor."""
        if self.memfd is None:
            return
        self.memfd.close()
        held = [lock for lock in self._locks.values() if lock.acquire(timeout=_CLOSE_WAIT)]
        if len(held) == len(self._locks):
            self.memfd = None  # with it goes the mapping
        for lock in held:
            lock.release()
