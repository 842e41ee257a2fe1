"""No hook may raise: an exception in one ends the engine (EngineDeadError).

A fault costs what was external, never the engine: the hook answers as if there were no external KV.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import KvportError

log = logging.getLogger("vllm.kvport")

T = TypeVar("T")

_SILENCE = 10.0  # seconds between two reports of one hook


class Faults:
    """Counts what went wrong in each hook and reports it without flooding the log."""

    def __init__(self, to: logging.Logger = log) -> None:
        """Begin with nothing wrong; reports go to that logger, which is the engine's."""
        self._log = to
        self.counts: dict[str, int] = {}
        self._reported: dict[str, float] = {}

    def add(self, hook: str) -> None:
        """Count an exception that is being handled, and log it now and then."""
        self.counts[hook] = self.counts.get(hook, 0) + 1
        now = time.monotonic()
        if now - self._reported.get(hook, -_SILENCE) >= _SILENCE:
            self._reported[hook] = now
            self._log.exception("kvport: %s failed (%d so far); going on without external KV", hook, self.counts[hook])


def guarded(default: Callable[[], Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a hook of the connector answer default() where it would raise."""

    def wrap(hook: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> T:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.faults.add(hook.__name__)
                return default()  # type: ignore[no-any-return]

        return call

    return wrap


def startup(hook: Callable[..., T]) -> Callable[..., T]:
    """Let errors that a user must see through, and nothing else: for hooks of the start."""

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        try:
            return hook(self, *args, **kwargs)
        except KvportError:
            raise
        except Exception:
            self.faults.add(hook.__name__)
            return None  # type: ignore[return-value]

    return call
