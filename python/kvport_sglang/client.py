"""The connection to the agent: calls of several threads of SGLang at once, each with a deadline.

One thread has the connection. A put or a get is over only when nobody can touch the pool for it any more: the
agent has answered, or it has ended. Plugins have nothing of the pool, so they are ended too, but not waited for.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvport_agent.errors import KvportError
from kvport_agent.link import Link, State
from kvport_agent.messages import message
from kvport_agent.spawn import Spawner

from .deadlines import GRACE

log = logging.getLogger("sglang.kvport")

CODE_BUSY = 1
_START_WAIT = 30.0
_IDLE = 0.25


@dataclass
class Call:
    """A call on its way."""

    fields: dict[str, Any]
    by: float  # when the agent counts as stuck; infinity: nobody minds
    fd: int | None = None
    number: int | None = None
    answer: Any = None
    over: threading.Event = field(default_factory=threading.Event)

    def end(self, answer: Any = None) -> None:
        """Let go whoever waits."""
        self.answer = answer
        self.over.set()


class Client:
    """An engine's connection to its agent. Any thread may call."""

    def __init__(self, spawner: Spawner, attach: Any, told: Callable[[Any], None], lost: Callable[[int], None]) -> None:
        """Take what finds the agent and the AgentAttachPages. told gets each state of the agent, lost how many agents have ended."""
        self._link = Link(spawner, lambda: (attach, None), "attach_pages", log, plugins=False)
        self._told, self._tell_lost, self._lost = told, lost, 0
        self._mu = threading.Lock()
        self._new: collections.deque[Call] = collections.deque()
        self._running: list[Call] = []
        self._memory: dict[int, tuple[int, int]] = {}  # number of a region: descriptor, size
        self._shown: list[Call] = []  # regions that the present agent does not have for sure
        self._life = 0
        self._ready = threading.Event()
        self._closing = False
        self._refused: KvportError | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvport", daemon=True)

    @property
    def ready(self) -> bool:
        """Say whether an agent is there that has all the memory."""
        return self._ready.is_set()

    @property
    def lost(self) -> int:
        """Count the agents that ended without our doing."""
        return self._link.lost

    def share(self, number: int, fd: int, size: int) -> None:
        """Name memory that every agent is given. Before start."""
        self._memory[number] = (fd, size)

    def start(self, wait: float = _START_WAIT) -> None:
        """Connect. A refusal is for the user; lateness is not."""
        self._thread.start()
        deadline = time.monotonic() + wait
        while not self._ready.wait(0.02) and time.monotonic() < deadline:
            if self._refused is not None:
                self.close()
                raise self._refused
        if not self._ready.is_set():
            log.warning("kvport: the agent is not there yet; nothing is stored until it is")

    def call(self, deadline: float, stuck: bool, **fields: Any) -> Any:
        """Make a call; None if there is no answer.

        deadline is when an answer should be there. stuck: an agent that has not answered some time later is ended,
        and until it has nobody is let go: it might still write. Else nobody waits any longer.
        """
        now = time.monotonic()
        call = Call(fields, now + deadline + GRACE if stuck else float("inf"))
        with self._mu:
            if self._closing or not self._ready.is_set():
                return None
            self._new.append(call)
        self._wake()
        if not call.over.wait(None if stuck else deadline):
            call.over.set()  # the thread forgets it
            return None
        return call.answer

    def close(self, wait: float = 2.0) -> None:
        """Leave in good order. Afterwards nothing of it is left, or soon."""
        with self._mu:
            self._closing = True
        self._wake()
        if self._thread.ident is None:
            self._close_pipe()
        elif threading.current_thread() is not self._thread:
            self._thread.join(wait)

    def _wake(self) -> None:
        with self._mu, contextlib.suppress(OSError):  # full: it wakes anyway
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _close_pipe(self) -> None:
        with self._mu:
            for fd in (self._wake_read, self._wake_write):
                if fd >= 0:
                    os.close(fd)
            self._wake_read = self._wake_write = -1

    # -- the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:  # a bug: what is under way must end all the same
                log.exception("kvport: a fault in the connection; the agent is ended")
                self._link.lose("a fault of ours")
                time.sleep(0.05)
        self._leave()

    def _leave(self) -> None:
        """Leave the agent, which is ended if it might still write."""
        self._ready.clear()
        if any(call.by != float("inf") for call in self._running):
            self._link.lose("the engine leaves in the middle of a call")
        while self._link.state is State.FENCING:
            self._link.poll()
            time.sleep(0.005)
        self._link.close()
        for call in [*self._take_new(), *self._running]:
            call.end()
        self._close_pipe()

    def _turn(self) -> None:
        self._wait()
        for event in self._link.poll():
            if hasattr(event, "counters"):
                self._told(event)
        if (n := self._link.lost - self._lost) > 0:  # after all that it has told
            self._lost += n
            self._tell_lost(n)
        self._see_state()
        for call in self._take_new():
            self._send(call)
        self._collect()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if (fd := self._link.fileno()) is not None:
            poller.register(fd, select.POLLIN)
        settled = self._link.state is State.UP and self._ready.is_set()
        rest = min((c.by for c in self._running), default=float("inf")) - time.monotonic()
        poller.poll(max(0.0, min(_IDLE if settled else 0.01, rest)) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 1 << 16)

    def _take_new(self) -> list[Call]:
        with self._mu:
            calls = list(self._new)
            self._new.clear()
        return calls

    def _see_state(self) -> None:
        """Show an agent the memory when it is new, and end the calls of one that has ended."""
        if self._link.state is State.UP:
            if self._life != self._link.life:
                self._life = self._link.life
                self._show()
            return
        self._ready.clear()
        self._life = 0
        if (refused := self._link.refused) is not None and refused.code != CODE_BUSY:
            self._refused = KvportError(f"kvport agent: {refused}")
        if self._link.state is State.FENCING:
            return  # it may still write
        for call in self._running:
            call.end()
        self._running.clear()
        self._shown.clear()

    def _show(self) -> None:
        self._shown = []
        for number, (fd, size) in self._memory.items():
            region = message("AgentPagesRegion")(region=number, size=size)
            call = Call({"pages_region": region}, time.monotonic() + 10.0, fd)
            self._shown.append(call)
            self._send(call)
        if not self._shown:
            self._ready.set()

    def _send(self, call: Call) -> None:
        if call.over.is_set():
            return
        call.number = self._link.post(call.fd, **call.fields)
        if call.number is None:
            call.end()
        else:
            self._running.append(call)

    def _collect(self) -> None:
        left = []
        for call in self._running:
            assert call.number is not None
            answer = self._link.answer(call.number)
            if answer is not None:
                call.end(answer)
            elif call.over.is_set():
                self._link.forget(call.number)
            else:
                left.append(call)
        self._running = left
        if self._shown and all(c.answer is not None for c in self._shown):
            self._shown = []
            self._ready.set()
        now = time.monotonic()
        if self._link.state is State.UP and any(now > call.by for call in self._running):
            self._ready.clear()
            self._link.lose("the agent does not answer")
