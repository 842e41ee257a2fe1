"""One process's connection to the agent: made, kept, lost, fenced, made again. Nothing waits in a step.

DOWN -> (connect, or spawn the agent) -> ATTACHING -> UP -> lost -> FENCING -> DOWN
"""

from __future__ import annotations

import enum
import logging
import select
import time
from collections.abc import Callable
from typing import Any

from .fence import Fence
from .frames import Frames, LostError, TooLargeError
from .messages import message
from .spawn import Spawner, peer_pid

log = logging.getLogger("vllm.kvport")

_BACKOFF_MIN, _BACKOFF_MAX = 0.05, 5.0
_ATTACH_TIMEOUT = 60.0  # an agent that does not answer an attach for so long is stuck
_KILL_WAIT = 0.02  # a killed process is gone after about a millisecond; no step waits longer
# An engine that has nothing to compute would look for the end of a transfer again and again, and take a core
# from those who work at it. So a step in which nothing is computed waits for news, in seconds; a request
# that comes meanwhile waits as long, a fraction of any step.
IDLE_WAIT = 0.005
# A side that waits for nothing has little to hear: what the agent tells waits in the socket for so many steps.
LISTEN_EVERY = 8
# Among the events of poll: a call was answered whose caller had stopped waiting.
LATE = object()


class State(enum.Enum):
    """Where a connection is."""

    DOWN = 0
    ATTACHING = 1
    UP = 2
    FENCING = 3


class RefusedError(Exception):
    """The agent answered an attach with an error."""

    def __init__(self, text: str, code: int) -> None:
        """Keep the error's code, see messages.CODE_*."""
        super().__init__(text)
        self.code = code


class Link:
    """The connection of one side. Used by one thread."""

    def __init__(
        self,
        spawner: Spawner,
        attach: Callable[[], tuple[Any, int | None]],
        kind: str = "attach",
        to: logging.Logger = log,
        plugins: bool = True,
    ) -> None:
        """Take what finds the agent, what makes the first call, of that kind, and the memory's descriptor, and the engine's logger.

        plugins: they may touch that memory, so that a lost agent is over only when they are.
        """
        self._log = to
        self._spawner = spawner
        self._attach = attach
        self._kind = kind
        self._plugins = plugins
        self._call = message("AgentCall")
        self._answer = message("AgentAnswer")
        self.state = State.DOWN
        self.life = 0  # of the agent we are attached to; 0: none
        self.attached: Any = None
        self.lost = 0  # connections that ended without our doing
        self.fenced: set[int] = set()  # lives of agents that have ended, and with them all who could touch our memory
        self.refused: RefusedError | None = None
        self.agent_state: Any = None  # the last AgentState
        self._frames: Frames | None = None
        self._fence: Fence | None = None
        self._inbox: list[Any] = []
        self._answers: dict[int, Any] = {}
        self._wanted: set[int] = set()
        self._overdue: set[int] = set()  # calls that were given up, and may be answered still
        self._next_id = 0
        self._retry_at = 0.0
        self._backoff = _BACKOFF_MIN
        self._attach_by = 0.0
        self._lost_life = 0

    def poll(self) -> list[Any]:
        """Go on as far as possible without waiting, and give the events that came.

        One system call where the connection is up and nothing came.
        """
        if self.state is State.UP or self.state is State.ATTACHING:
            self._receive()
        if self.state is State.FENCING:
            self._go_on_fencing(0.0)
        if self.state is State.DOWN and time.monotonic() >= self._retry_at:
            self._connect()
        if self.state is State.ATTACHING and time.monotonic() > self._attach_by:
            self._drop("the agent did not answer the attach")
        if not self._inbox:
            return []
        events, self._inbox = self._inbox, []
        return events

    def wait_up(self, timeout: float) -> bool:
        """Wait until attached: only while the engine starts."""
        deadline = time.monotonic() + timeout
        while True:
            self._keep(self.poll())
            if self.state is State.UP:
                return True
            if self.refused is not None:
                return False
            rest = deadline - time.monotonic()
            if rest <= 0:
                return False
            self._wait_readable(min(rest, 0.05))

    def _keep(self, events: list[Any]) -> None:
        self._inbox = events + self._inbox

    def send(self, **fields: Any) -> bool:
        """Send a call that has no answer."""
        if self.state is not State.UP or self._frames is None:
            return False
        try:
            self._frames.send(self._call(**fields).SerializeToString())
        except TooLargeError as err:
            self._log.error("kvport: %s: it was not sent", err)
            return False
        except LostError as err:
            self._drop(str(err))
            return False
        return True

    def post(self, fd: int | None = None, **fields: Any) -> int | None:
        """Send a call, with a descriptor beside it, and do not wait; answer gives what comes. None: it was not sent."""
        if self.state is not State.UP or self._frames is None:
            return None
        self._next_id += 1
        number = self._next_id
        try:
            if fd is not None and not self._frames.flush():  # it goes with the first byte of its own frame
                raise LostError("the agent does not read")
            self._frames.send(self._call(id=number, **fields).SerializeToString(), fd)
        except TooLargeError as err:
            self._log.error("kvport: %s: it was not sent", err)
            return None
        except LostError as err:
            self._drop(str(err))
            return None
        self._wanted.add(number)
        return number

    def answer(self, number: int) -> Any:
        """Give what a call that was posted was answered, once; None: nothing yet, or never."""
        if number not in self._answers:
            return None
        self._wanted.discard(number)
        return self._answers.pop(number)

    def forget(self, number: int) -> None:
        """Say that nobody waits for a posted call's answer any more."""
        self._wanted.discard(number)
        self._answers.pop(number, None)

    def fileno(self) -> int | None:
        """Give what becomes readable when the agent says something; None without a connection."""
        return self._frames.fileno() if self._frames is not None else None

    def call(self, timeout: float, **fields: Any) -> Any:
        """Send a call and wait at most so long for its answer; None if there is none by then."""
        self._next_id += 1
        number = self._next_id
        if not self.send(id=number, **fields):
            return None
        self._wanted.add(number)
        deadline = time.monotonic() + timeout
        try:
            while self.state is State.UP:
                self._receive()
                if number in self._answers:
                    return self._answers.pop(number)
                rest = deadline - time.monotonic()
                if rest <= 0:
                    self._overdue.add(number)
                    return None
                self._wait_readable(rest)
            return None
        finally:
            self._wanted.discard(number)

    def wait(self, timeout: float) -> None:
        """Wait until something came, at most so long: for steps in which the engine has nothing else to do."""
        if self.state is State.UP and not self._inbox:
            self._wait_readable(timeout)

    def _wait_readable(self, timeout: float) -> None:
        if self._frames is None:
            time.sleep(min(timeout, 0.01))
            return
        poller = select.poll()
        # An agent that has half of a call answers nothing: the rest goes out as soon as the socket takes it.
        poller.register(self._frames.fileno(), select.POLLIN | (select.POLLOUT if self._frames.unsent else 0))
        poller.poll(max(0.0, timeout) * 1000)

    def _connect(self) -> None:
        self._retry_at = time.monotonic() + self._backoff
        self._backoff = min(self._backoff * 2, _BACKOFF_MAX)
        sock = self._spawner.connect()
        if sock is None:
            if self._spawner.starting:  # it listens within milliseconds
                self._retry_at = time.monotonic() + 0.005
                self._backoff = _BACKOFF_MIN
            return
        self.refused = None
        try:
            self._fence = Fence(peer_pid(sock), self._plugins)
            self._frames = Frames(sock)
            body, fd = self._attach()
            self._next_id += 1
            self._wanted = {self._next_id}
            self._answers.clear()
            self._frames.send(self._call(id=self._next_id, **{self._kind: body}).SerializeToString(), fd)
        except (LostError, OSError) as err:
            self._drop(str(err))
            return
        self.state = State.ATTACHING
        self._attach_by = time.monotonic() + _ATTACH_TIMEOUT

    def _receive(self) -> None:
        assert self._frames is not None
        try:
            frames = self._frames.receive()
            for frame in frames:
                self._take(self._answer.FromString(frame))
        except LostError as err:
            self._drop(str(err))
        except Exception as err:  # a frame that is no AgentAnswer
            self._drop(f"the agent sent what is no answer: {err}")

    def _take(self, answer: Any) -> None:
        kind = answer.WhichOneof("result")
        if kind == "event":
            self._inbox.append(answer.event)
        elif kind == "blocks":
            self._inbox.append(answer.blocks)
        elif kind == "plugin":
            self._take_plugin(answer.plugin)
        elif kind == "state":
            self.agent_state = answer.state
            self._inbox.append(answer.state)
        elif self.state is State.ATTACHING and answer.id in self._wanted:
            self._take_attached(answer)
        elif answer.id in self._wanted:
            self._answers[answer.id] = answer
        elif answer.id in self._overdue:
            self._overdue.discard(answer.id)
            self._inbox.append(LATE)

    def _take_plugin(self, plugin: Any) -> None:
        assert self._frames is not None and self._fence is not None
        fd = self._frames.take_fd()
        if fd is None:
            self._log.warning("kvport: plugin %s (pid %d) was announced without its pidfd", plugin.name, plugin.pid)
            return
        self._fence.add(fd, plugin.pid)

    def _take_attached(self, answer: Any) -> None:
        self._wanted.clear()
        if answer.WhichOneof("result") != "attached":
            self.refused = RefusedError(answer.error.message or "the agent refused the attach", answer.error.code)
            self._drop(str(self.refused))
            return
        self.refused = None
        self.attached = answer.attached
        self.life = answer.attached.life
        self.state = State.UP
        self._backoff = _BACKOFF_MIN

    def lose(self, why: str) -> None:
        """Give up an agent that is stuck: it and its plugins are ended."""
        self._drop(why)

    def _drop(self, why: str) -> None:
        """End a connection: from now on nothing of it is believed, and nobody may use its blocks yet."""
        if self._frames is not None:
            self._frames.close()
        self._log.warning("kvport: no agent: %s", why)
        self._frames = None
        self.lost += 1
        self._lost_life, self.life = self.life, 0
        self._answers.clear()
        self._overdue.clear()
        if self.refused is not None and self._lost_life == 0:
            self._let_go()  # an agent that refuses us has nothing of ours; others may be using it
            return
        self.state = State.FENCING
        if self._fence is not None:
            self._fence.kill()
        self._go_on_fencing(_KILL_WAIT)

    def _let_go(self) -> None:
        if self._fence is not None:
            self._fence.close()
        self._fence = None
        self.state = State.DOWN
        self._retry_at = time.monotonic() + self._backoff

    def _go_on_fencing(self, wait: float) -> None:
        if self._fence is None or self._fence.over(wait) or (wait and self._fence.over(wait)):
            self._fence = None
            self.state = State.DOWN
            if self._lost_life:
                self.fenced.add(self._lost_life)
            self._lost_life = 0
            self._spawner.reap()
            self._retry_at = time.monotonic() + self._backoff

    def close(self, timeout: float = 1.0) -> None:
        """Leave in good order. The agent ends when all have left."""
        if self.state is State.UP:
            self.call(timeout, detach=message("AgentDetach")())
        if self._frames is not None:
            self._frames.close()
        if self._fence is not None:
            self._fence.close()
        self._frames = self._fence = None
        self.state, self.life = State.DOWN, 0
        self._retry_at = float("inf")
        self._spawner.close()
