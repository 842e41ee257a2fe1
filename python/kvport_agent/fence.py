"""Who may touch blocks of the cache, and making sure that they no longer do.

An agent that dies takes its guard with it, but its plugins may live on for a moment and write into
blocks. So a process holds a pidfd of the agent and of every plugin that was announced: it kills them
and waits until each has ended, before it uses a block that was being read or written.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal


class Fence:
    """The agent and the plugins of one connection, by pidfds, which it owns."""

    def __init__(self, agent_pid: int) -> None:
        """Hold the agent, which is alive: it has just answered connect."""
        self._fds: list[int] = []
        self.pids: list[int] = []
        self._killed = False
        with contextlib.suppress(ProcessLookupError):  # gone already: nothing to wait for
            self._fds.append(os.pidfd_open(agent_pid))
            self.pids.append(agent_pid)

    def add(self, pidfd: int, pid: int) -> None:
        """Hold a plugin, announced before it could touch any block."""
        self._fds.append(pidfd)
        self.pids.append(pid)
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Drop plugins that ended long ago, so that a restarting plugin does not use up descriptors."""
        ended = self._ended()
        for fd in ended:
            at = self._fds.index(fd)
            del self._fds[at], self.pids[at]
            os.close(fd)

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
        """Say whether all have ended, after waiting at most so many seconds for the next one."""
        if not self._killed:
            self.kill()
        ended = self._ended(wait)
        for fd in ended:
            os.close(fd)
        self._fds = [fd for fd in self._fds if fd not in ended]
        return not self._fds

    def close(self) -> None:
        """Let go of them, alive or not."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
