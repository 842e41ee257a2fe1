"""The numbers on SGLang's own /metrics, where it has that (--enable-metrics)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from typing import Any

from kvport_agent.prom import Metrics

from .stats import Numbers

_RANK = ("tp_rank", "pp_rank", "dp_rank", "attn_cp_rank")
_EVERY = 1.0  # seconds: SGLang asks with every step


class Page:
    """What one rank shows. SGLang's server reads what each of its processes leaves in the files of prometheus_client."""

    def __init__(self, storage: Any) -> None:
        """Take the HiCacheStorageConfig."""
        # Not before SGLang has named the folder of these files: it is looked up when this is imported.
        from prometheus_client import Counter, Gauge, Histogram

        self._rank = [getattr(storage, name, None) or 0 for name in _RANK]
        with contextlib.suppress(Exception):  # of replicas (--dp-size) only this tells them apart
            runtime = importlib.import_module("sglang.srt.runtime_context")
            self._rank[_RANK.index("dp_rank")] = runtime.get_parallel().dp_rank or self._rank[_RANK.index("dp_rank")]
        # Of no registry: this process has no page, and one that attaches a backend again makes its metrics again.
        self._metrics = Metrics(
            functools.partial(Counter, registry=None),
            functools.partial(Gauge, registry=None, multiprocess_mode="mostrecent"),
            functools.partial(Histogram, registry=None),
            _RANK,
        )
        self._next = 0.0

    def show(self, numbers: Numbers) -> None:
        """Show what is new, now and then."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self.show_now(numbers)

    def show_now(self, numbers: Numbers) -> None:
        """Show what is new."""
        self._metrics.observe(numbers.take(), self._rank)


def page_of(storage: Any) -> Page | None:
    """Give the rank's part of SGLang's page, if it has one."""
    if not getattr(storage, "enable_storage_metrics", False):
        return None
    try:
        return Page(storage)
    except ImportError:
        return None
