"""The paged cache in memory that other processes can map: a sealed memfd.

Three ways, best first. adopt: vLLM's one allocation is answered with a mapping of the memfd. move: an
allocation that is there already is moved under its own address. mirror: where memory cannot be shared
at all, a second cache beside the first, and only the blocks of a transfer are copied.

Everything that knows torch is behind Tensors, so that the rest is tested without it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvport_agent.errors import UnsupportedError
from kvport_agent.memfd import Memfd, map_over, round_up

from .layout import Group, Segment, View, digest_room, segments_of

log = logging.getLogger("vllm.kvport")

_PAGE = mmap.PAGESIZE


class Tensors(Protocol):
    """What of torch the memory needs."""

    def view(self, tensor: Any) -> View:
        """Describe a tensor."""

    def storage(self, tensor: Any) -> tuple[int, int]:
        """Give address and bytes of the storage behind a tensor."""

    def on_host(self, tensor: Any) -> bool:
        """Say whether the tensor's bytes can be reached by address."""

    def make_movable(self, tensor: Any) -> tuple[int, int]:
        """Move the storage to a mapping of its own, in place; give its address and bytes."""

    def copy_out(self, tensor: Any, block: int, ratio: int, into: memoryview) -> None:
        """Copy a block of a tensor, in the order of its dimensions."""

    def copy_in(self, tensor: Any, block: int, ratio: int, data: memoryview) -> None:
        """Copy a block back."""


@dataclass
class Shared:
    """The cache as the agent will see it."""

    memfd: Memfd
    segments: list[Segment]
    how: str  # adopt, move or mirror
    mirror: Mirror | None = None


def adopted(memfd: Memfd | None, groups: Sequence[Group], views: dict[str, View], blocks: int) -> Shared | None:
    """Use the memory that the allocation was answered with, if that is where the tensors are."""
    if memfd is None:
        return None
    base, end = memfd.address, memfd.address + memfd.size
    if not all(base <= v.address < end for v in views.values()):
        return None
    segments = segments_of(groups, views, blocks, lambda address: address - base)
    last = max(s.offset + (blocks - 1) * s.stride + s.bytes for s in segments)
    if digest_room(last, segments, blocks) > memfd.size:
        log.warning("kvport: the cache was allocated without room for digests: moving it")
        return None
    return Shared(memfd, segments, "adopt")


def move(tensors: Tensors, caches: dict[str, Any], groups: Sequence[Group], blocks: int) -> Shared:
    """Put sealed memory under the storages of the caches, content kept, addresses as after the move."""
    placed: dict[int, tuple[int, int]] = {}  # address of a storage: its bytes, its offset in the region
    offset = 0
    seen: set[int] = set()
    for tensor in caches.values():
        if tensors.storage(tensor)[0] in seen:
            continue
        address, size = tensors.make_movable(tensor)
        seen.add(address)
        if address % _PAGE:
            raise UnsupportedError("the cache's memory is not a mapping of its own")
        placed[address] = (size, offset)
        offset += round_up(size)

    def offset_of(address: int) -> int:
        for base, (size, at) in placed.items():
            if base <= address < base + size:
                return at + address - base
        raise UnsupportedError("a KV cache tensor lies outside its storage")

    views = {name: tensors.view(tensor) for name, tensor in caches.items()}
    segments = segments_of(groups, views, blocks, offset_of)
    memfd = Memfd(digest_room(offset, segments, blocks))
    for address, (size, at) in placed.items():
        ctypes.memmove(memfd.address + at, address, size)
        map_over(address, round_up(size), memfd.fd, at)
    return Shared(memfd, segments, "move")


class Mirror:
    """A second cache that is shared, for one that cannot be. The shim copies blocks between the two."""

    def __init__(self, tensors: Tensors, caches: dict[str, Any], groups: Sequence[Group], blocks: int) -> None:
        """Lay the mirror out: layer by layer, blocks dense, dimensions in their order."""
        self._tensors = tensors
        self._layers: list[list[tuple[Any, int, int, int]]] = []  # by group: tensor, offset, bytes, ratio
        self.segments: list[Segment] = []
        offset = layer = 0
        for index, group in enumerate(groups):
            mine, seen = [], set()
            for name in group.layers:
                view = tensors.view(caches[name])
                if view.address not in seen:
                    seen.add(view.address)
                    ratio = view.shape[0] // blocks
                    size = view.item * ratio
                    for n in view.shape[1:]:
                        size *= n
                    mine.append((caches[name], offset, size, ratio))
                    self.segments.append(Segment(layer, index, offset, size, size))
                    offset += blocks * size
                layer += 1
            self._layers.append(mine)
        self.memfd = Memfd(digest_room(offset, self.segments, blocks))
        self._bytes = memoryview(self.memfd.map)

    def _spots(self, ids: Sequence[Sequence[int]]) -> Iterable[tuple[Any, int, int, memoryview]]:
        for layers, blocks in zip(self._layers, ids, strict=True):
            for tensor, offset, size, ratio in layers:
                for block in blocks:
                    at = offset + block * size
                    yield tensor, block, ratio, self._bytes[at : at + size]

    def save(self, ids: Sequence[Sequence[int]]) -> None:
        """Copy computed blocks out, before anybody hears that they are computed."""
        for tensor, block, ratio, spot in self._spots(ids):
            self._tensors.copy_out(tensor, block, ratio, spot)

    def load(self, ids: Sequence[Sequence[int]]) -> None:
        """Copy loaded blocks in, before anybody hears that they are loaded."""
        for tensor, block, ratio, spot in self._spots(ids):
            self._tensors.copy_in(tensor, block, ratio, spot)


def share(tensors: Tensors, caches: dict[str, Any], groups: Sequence[Group], blocks: int, memfd: Memfd | None, want: str) -> Shared:
    """Get the caches into memory that others can map, the best way that works."""
    host = all(tensors.on_host(t) for t in caches.values())
    if host and want in ("auto", "adopt"):
        views = {name: tensors.view(tensor) for name, tensor in caches.items()}
        if found := adopted(memfd, groups, views, blocks):
            return found
    if host and want in ("auto", "move"):
        try:
            return move(tensors, caches, groups, blocks)
        except (UnsupportedError, OSError, RuntimeError) as err:
            if want == "move":
                raise
            log.warning("kvport: the cache cannot be moved (%s): blocks will be copied", err)
    if want in ("auto", "mirror"):
        log.warning("kvport: the cache's memory cannot be shared: a mirror of its size is used, and blocks are copied")
        mirror = Mirror(tensors, caches, groups, blocks)
        return Shared(mirror.memfd, mirror.segments, "mirror", mirror)
    raise UnsupportedError(f"kvport.memory is {want!r}, but the cache's memory cannot be shared that way")
