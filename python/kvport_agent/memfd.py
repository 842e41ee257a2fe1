"""Memory that other processes can map: a sealed memfd."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time

_PAGE = mmap.PAGESIZE
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_COLLAPSE_AT_ONCE, _COLLAPSE_SECONDS = 32 * _HUGE, 2.0


def round_up(n: int, to: int = _PAGE) -> int:
    """Round up to whole pages."""
    return -(-n // to) * to


class Memfd:
    """Sealed memory of a fixed size; the fd is this object's until close."""

    def __init__(self, size: int) -> None:
        """Make zeroed memory. All its pages are there: a lack of memory is an error here, no SIGBUS later."""
        self.size = round_up(size)
        self.fd = os.memfd_create("kvport-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            os.posix_fallocate(self.fd, 0, self.size)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            # Addresses for it, and the one in it that suits huge pages. They live as long as the map is used.
            span = mmap.mmap(-1, self.size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            skip = -ctypes.addressof(ctypes.c_char.from_buffer(span)) % _HUGE
            self.map = memoryview(span)[skip : skip + self.size]
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
            map_over(self.address, self.size, self.fd, 0)
        except BaseException:
            os.close(self.fd)
            raise
        _collapse(self.address, self.size)

    def close(self) -> None:
        """Close the descriptor; the mapping lives as long as tensors use it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _collapse(address: int, size: int) -> None:
    """Make huge pages of a mapping, as many as a moment allows: whoever copies or reads blocks is faster by about a quarter.

    Where the kernel does not do it, small pages do.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    deadline = time.monotonic() + _COLLAPSE_SECONDS
    end = address + size - size % _HUGE
    while address < end and time.monotonic() < deadline:
        piece = min(_COLLAPSE_AT_ONCE, end - address)
        if libc.madvise(address, piece, _MADV_COLLAPSE) != 0:
            return
        address += piece


def map_over(address: int, size: int, fd: int, offset: int) -> None:
    """Put a part of a file where something else is mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    got = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    if got != address:
        raise OSError(ctypes.get_errno(), "mmap of the cache")
