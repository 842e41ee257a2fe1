"""Which weights this process computes with. SGLang changes them in a running engine, and tells no storage backend.

Pages of other weights must never be found, so pages are kept in a namespace. The first one is that of the weights
that the engine started with. Where SGLang changes weights, hooks of ours see it before it begins: from then on no
page is found, loaded or stored, until SGLang has emptied its own caches, which hold KV of the old weights. The next
namespace is a new random one, since nobody knows what the new weights are.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("sglang.kvport")

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
_NAMESPACE_BYTES = 16


def fresh() -> bytes:
    """Make a namespace that nobody else has."""
    return os.urandom(_NAMESPACE_BYTES)


class Weights:
    """The weights of one process, as far as SGLang's own calls show. Any thread may ask."""

    def __init__(self) -> None:
        """Begin with the weights of the start."""
        self.watched = False  # SGLang calls the hooks below
        self.matter = False  # a backend of ours keeps pages
        self._mu = threading.Lock()
        self._namespace: bytes | None = b""
        self._session = False  # between SGLang's begin_weight_update and end_weight_update
        self._flushed = False  # SGLang's caches are empty since the last change

    @property
    def namespace(self) -> bytes | None:
        """Give the namespace of pages; empty: that of the start; None: there is none, since weights are changing."""
        return self._namespace

    def change(self) -> None:
        """Note that weights are about to change."""
        with self._mu:
            first, self._namespace, self._flushed = self._namespace is not None, None, False
        if first and self.matter:
            log.warning("kvport: SGLang changes its weights: no page is found or stored until its caches are emptied")

    def flush(self) -> None:
        """Note that SGLang's caches have been emptied."""
        with self._mu:
            self._flushed = True
            self._settle()

    def session(self, is_open: bool) -> None:
        """Note the beginning or end of a change that takes several calls, in which caches may be emptied more than once."""
        with self._mu:
            self._session = is_open
            self._settle()

    def _settle(self) -> None:
        if self._namespace is None and self._flushed and not self._session:
            self._namespace = fresh()
            if self.matter:
                log.warning("kvport: SGLang has other weights now: their pages are kept apart, and only until it ends")


# SGLang's hooks are functions of the process, and so are its weights.
WEIGHTS = Weights()


def _change(*_args: Any, **_kwargs: Any) -> None:
    WEIGHTS.change()


def _flushed(result: Any, *_args: Any, **_kwargs: Any) -> None:
    if result:
        WEIGHTS.flush()


def _began(result: Any, *_args: Any, **_kwargs: Any) -> None:
    if getattr(result, "success", False):
        WEIGHTS.session(True)


def _ended(result: Any, *_args: Any, **_kwargs: Any) -> None:
    if getattr(result, "success", False):
        WEIGHTS.session(False)


def _release(_updater: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """Weights whose memory was given up come back as they were, or not at all, or as others."""
    tags = getattr(request, "tags", None)
    if not tags or "weights" in tags:
        WEIGHTS.change()


# What SGLang does to weights, when a hook looks at it, and the hook.
_HOOKS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    *((f"{_UPDATER}.update_weights_from_{source}", "BEFORE", _change) for source in ("disk", "distributed", "tensor", "ipc")),
    (f"{_UPDATER}.begin_weight_update", "BEFORE", _change),
    (f"{_UPDATER}.begin_weight_update", "AFTER", _began),
    (f"{_UPDATER}.end_weight_update", "AFTER", _ended),
    (f"{_UPDATER}.release_memory_occupation", "BEFORE", _release),
    (_FLUSH, "AFTER", _flushed),
)


def register(registry: Any, kinds: Any) -> None:
    """Have SGLang call the hooks; it puts them in place when all plugins are loaded."""
    for target, kind, hook in _HOOKS:
        registry.register(target, hook, getattr(kinds, kind))


def look() -> None:
    """Note whether SGLang has put all hooks in place: another SGLang may change weights elsewhere."""
    WEIGHTS.watched = all(_in_place(target) for target, _, _ in _HOOKS)


def _in_place(target: str) -> bool:
    owner, _, name = target.rpartition(".")
    try:
        return hasattr(getattr(pkgutil.resolve_name(owner), name), "__wrapped__")
    except (ImportError, AttributeError):
        return False
