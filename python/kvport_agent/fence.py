"""Who may touch blocks of the cache, and making sure that they no longer do.

An agent that dies takes its guard with it, but its plugins may live on for a moment and write into
blocks. So a process holds a pidfd of the agent and of every plugin that was announced: it kills them
and waits until each has ended, before it uses a block that was being read or written. Where plugins
have none of the engine's memory, only the agent is waited for: a plugin that waits for a disk that
hangs ends when the disk does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable


class Fence:
    """The agent and the plugins of one connection, by pidfds, which it owns."""

    def __init__(self, agent_pid: int, plugins: bool = True) -> None:
        """Hold the agent, which is alive: it has just answered connect. plugins: they are waited for as well."""
        self._fds: list[int] = []
        self.pids: list[int] = []
        self._killed = False
        self._plugins = plugins
        self._agent: int | None = None
        with contextlib.suppress(ProcessLookupError):  # gone already: nothing to wait for
            self._agent = os.pidfd_open(agent_pid)
            self._fds.append(self._agent)
            self.pids.append(agent_pid)

    def add(self, pidfd: int, pid: int) -> None:
        """Hold a plugin, announced before it could touch any block."""
        self._fds.append(pidfd)
        self.pids.append(pid)
        self._drop(self._ended())  # so that a plugin that starts again and again does not use up descriptors

    def _drop(self, fds: Iterable[int]) -> None:
        for fd in fds:
            at = self._fds.index(fd)
            del self._fds[at], self.pids[at]
            os.close(fd)
            if fd == self._agent:
                self._agent = None

    def _ended(self, wait: float = 0.0) -> set[int]:
        if not self._fds:
            return set()
        poller = select.poll()
        for fd in self._fds:
            poller.register(fd, select.POLLIN)
        return {fd for fd, _ in poller.poll(wait * 1000)}

    def kill(self) -> None:
        """End all of them; over() tells when they have."""
        self._killed = True
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def over(self, wait: float = 0.0) -> bool:
        """Say whether all that are waited for have ended, after waiting at most so many seconds for the next one."""
        if not self._killed:
            self.kill()
        self._drop(self._ended(wait))
        if self._fds and not self._plugins and self._agent is None:
            self.close()  # they have been killed, and touch nothing of ours until they end
        return not self._fds

    def close(self) -> None:
        """Let go of them, alive or not."""
        self._drop(list(self._fds))
