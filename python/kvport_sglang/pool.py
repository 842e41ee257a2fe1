"""SGLang's pool of pages in host memory: where the parts of a page lie, and in which memory.

With "allocator": "shm" the pool lies in a memfd that SGLang made. It cannot be sealed any more; the agent reads
and writes it by calls, so that does no harm. Any other pool is copied from and to memory that can be shared.
"""

from __future__ import annotations

import bisect
import fcntl
import logging
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvport_agent.errors import UnsupportedError

log = logging.getLogger("sglang.kvport")

_F_GET_SEALS = 1034
# What pools of different models have of these.
_SIZES = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "start_layer", "end_layer")


@dataclass(frozen=True)
class Mapped:
    """A part of a file where it is mapped."""

    start: int
    end: int
    offset: int


class Shared:
    """The memfd in which a pool lies, and where it is mapped."""

    def __init__(self, fd: int, parts: Sequence[Mapped], size: int) -> None:
        """Take the pool's own descriptor, which stays the pool's."""
        self.fd = fd
        self.size = size
        self._parts = sorted(parts, key=lambda p: p.start)
        self._starts = [p.start for p in self._parts]

    def offset(self, address: int, length: int) -> int:
        """Say where in the file an address lies, of so many bytes that follow each other there."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address + length > self._parts[at].end:
            raise UnsupportedError("a page of the pool does not lie in the pool's own memory")
        return self._parts[at].offset + address - self._parts[at].start


def shared(pool: Any) -> Shared | None:
    """Find the memfd of a pool; None if there is none that others could use."""
    fd = getattr(getattr(pool, "allocator", None), "fd", None)
    if not isinstance(fd, int) or fd < 0:
        return None
    try:
        fcntl.fcntl(fd, _F_GET_SEALS)
        info = os.fstat(fd)
        os.pwrite(fd, os.pread(fd, 1, 0), 0)  # memory of huge pages cannot be written by calls; nobody uses the pool yet
    except OSError as err:
        log.warning("kvport: the pool's descriptor is no memfd that calls can read and write (%s)", err)
        return None
    parts = _mappings(info.st_dev, info.st_ino)
    return Shared(fd, parts, info.st_size) if parts else None


def _mappings(device: int, inode: int) -> list[Mapped]:
    found = []
    for line in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        major, minor = (int(part, 16) for part in fields[3].split(":"))
        if int(fields[4]) == inode and os.makedev(major, minor) == device and fields[1].startswith("rw"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append(Mapped(start, end, int(fields[2], 16)))
    return found


@dataclass(frozen=True)
class Geometry:
    """What decides the bytes of a page."""

    layout: str
    page_tokens: int
    lengths: tuple[int, ...]  # of the parts of a page, in the order of get_page_buffer_meta
    text: str


def geometry(pool: Any, zero_copy: bool) -> Geometry:
    """Read how a pool keeps its pages."""
    tokens = int(pool.page_size)
    if zero_copy:
        pointers, sizes = pool.get_page_buffer_meta(_rows(0, tokens))
        lengths = tuple(int(n) for n in sizes)
        if not lengths or len(pointers) != len(lengths):
            raise UnsupportedError(f"a page of the pool has {len(pointers)} addresses and {len(lengths)} sizes")
    else:
        page = pool.get_dummy_flat_data_page()
        lengths = (int(page.numel()) * int(page.element_size()),)
    parts = [
        f"pool {type(pool).__name__}",
        f"layout {pool.layout}",
        *([f"format {tag}"] if (tag := getattr(pool, "storage_format_tag", None)) else []),
        f"page {tokens} tokens",
        f"dtype {pool.dtype}",
        "addresses" if zero_copy else "tensors",
        *(f"{name} {getattr(pool, name)}" for name in _SIZES if _plain(pool, name)),
        f"parts {len(lengths)} of {sum(lengths)} bytes: {','.join(map(str, lengths[:8]))}",
    ]
    return Geometry(str(pool.layout), tokens, lengths, "; ".join(parts))


def _plain(pool: Any, name: str) -> bool:
    return isinstance(getattr(pool, name, None), (int, str))


def _rows(first: int, n: int) -> Any:
    """Make row numbers as SGLang gives them."""
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return list(range(first, first + n))
    return torch.arange(first, first + n, dtype=torch.int64)


def lies_in(pool: Any, memory: Shared | None, pages: Geometry) -> Shared | None:
    """Give the memory back if the first and last page of the pool lie in it: a pool may be made of several."""
    if memory is None:
        return None
    try:
        for first in (0, (int(pool.size) // pages.page_tokens - 1) * pages.page_tokens):
            parts = parts_of(pool, 1, _rows(first, pages.page_tokens), pages.lengths)
            for address, length in zip(parts, pages.lengths, strict=True):
                memory.offset(address, length)
    except UnsupportedError as err:
        log.warning("kvport: %s", err)
        return None
    return memory


def parts_of(pool: Any, keys: int, rows: Any, lengths: Sequence[int]) -> list[int]:
    """Give the address of every part of every page; raise if the pages are not as they were at the start."""
    pointers, sizes = pool.get_page_buffer_meta(rows)
    if len(pointers) != keys * len(lengths) or list(sizes) != list(lengths) * keys:
        raise UnsupportedError(f"the pool gives {len(pointers)} parts for {keys} pages, want {len(lengths)} of the same sizes for each")
    return [int(p) for p in pointers]
