"""Frames on a unix stream socket: length as four bytes, little endian, then a message.

A descriptor travels beside the first byte of its frame. Nothing here ever waits.
"""

from __future__ import annotations

import array
import collections
import os
import socket
import struct

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_ANCILLARY = socket.CMSG_SPACE(16 * 4)  # for 16 descriptors
MAX_FRAME = 64 << 20
MAX_SENT = 16 << 20  # an agent ends a connection that brings a larger frame
# What may wait for a peer that does not read: far more than any engine has under way.
MAX_UNSENT = 64 << 20


class LostError(ConnectionError):
    """The connection is over."""


class TooLargeError(ValueError):
    """A frame is larger than an agent takes; nothing of it was sent."""


class Frames:
    """One connection's frames. It owns the socket and every descriptor that nobody took."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        self.sock = sock
        self._room = bytearray(_CHUNK)  # recvmsg would make one of this size at every call
        self._in = bytearray()
        self._out = bytearray()
        self._fds: collections.deque[int] = collections.deque()

    def fileno(self) -> int:
        """Give the socket's descriptor, for poll."""
        return self.sock.fileno()

    def send(self, payload: bytes, fd: int | None = None) -> None:
        """Send a frame, or what of it fits; the rest goes with the next call of anything here."""
        if len(payload) > MAX_SENT:
            raise TooLargeError(f"a call of {len(payload)} bytes, of which an agent takes {MAX_SENT}")
        frame = _LENGTH.pack(len(payload)) + payload
        if fd is not None:
            self._send_with(frame, fd)
            return
        if self._out:
            self._queue(frame)
            self.flush()
            return
        sent = self._try_send(frame)
        if sent < len(frame):
            self._queue(frame[sent:])

    def _send_with(self, frame: bytes, fd: int) -> None:
        # The first frame of its connection: nothing is queued before it, the buffer is empty.
        try:
            sent = socket.send_fds(self.sock, [frame], [fd])
        except OSError as err:
            raise LostError(str(err)) from err
        self._queue(frame[sent:])

    def _queue(self, data: bytes) -> None:
        self._out += data
        if len(self._out) > MAX_UNSENT:
            raise LostError("the agent does not read")

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as err:
            raise LostError(str(err)) from err

    @property
    def unsent(self) -> bool:
        """Say whether something waits until the socket takes it."""
        return bool(self._out)

    def flush(self) -> bool:
        """Send what is queued, as far as possible, and say whether nothing is left."""
        while self._out:
            sent = self._try_send(memoryview(self._out)[:_CHUNK].tobytes())
            if sent == 0:
                return False
            del self._out[:sent]
        return True

    def receive(self) -> list[bytes]:
        """Give the frames that are there. One system call where there are none."""
        if self._out:
            self.flush()
        while True:
            try:
                size, ancillary, _, _ = self.sock.recvmsg_into([self._room], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as err:
                raise LostError(str(err)) from err
            self._take_fds(ancillary)
            if size == 0:
                if self._in:
                    raise LostError("the agent left in the middle of a frame")
                raise LostError("the agent left")
            self._in += memoryview(self._room)[:size]
            if size < _CHUNK and not ancillary:
                break
        return self._split() if self._in else []

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)

    def _split(self) -> list[bytes]:
        frames: list[bytes] = []
        start = 0
        while len(self._in) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._in, start)
            if size > MAX_FRAME:
                raise LostError(f"a frame of {size} bytes, limit {MAX_FRAME}")
            end = start + _LENGTH.size + size
            if len(self._in) < end:
                break
            frames.append(bytes(memoryview(self._in)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._in[:start]
        return frames

    def take_fd(self) -> int | None:
        """Give the oldest descriptor that nobody took; it is the caller's from now on."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        """Close the connection and all descriptors that are left."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())
