"""What becomes of pages: for SGLang's metrics, and for whoever asks."""

from __future__ import annotations

import threading
from typing import Any

from kvport_agent.stats import Counters, empty, merge, split_key

# Intervals longer than this many calls lose their first ones: SGLang asks with every step.
_MOST = 1024

# Counters of this package.
SHIM = {
    "kvport_sglang_agents_lost_total": "Connections to an agent that ended, also those that a refusal or this package has ended.",
    "kvport_sglang_copied_bytes_total": "Bytes of pages that were copied through memory of our own.",
    "kvport_sglang_exists_late_total": "Questions whose answer the agent did not have in time (exists_ms, kvport.deadlines.later).",
    "kvport_sglang_exists_unanswered_total": "Questions that the agent did not answer in time, or at all.",
    "kvport_sglang_faults_total": "Exceptions that were caught in a call: bugs of this package.",
    "kvport_sglang_get_done_pages_total": "Pages that were loaded.",
    "kvport_sglang_get_failed_pages_total": "Pages that the connector did not bring, or not as they were stored.",
    "kvport_sglang_get_late_pages_total": "Pages that did not come in time (get_ms).",
    "kvport_sglang_get_memory_pages_total": "Pages that could not be copied to the pool, which is smaller than it was.",
    "kvport_sglang_get_unanswered_pages_total": "Pages of gets that the agent did not answer.",
    "kvport_sglang_put_done_pages_total": "Pages that were stored, or were there.",
    "kvport_sglang_put_failed_pages_total": "Pages that the connector did not store.",
    "kvport_sglang_put_late_pages_total": "Pages that were not stored in time (put_ms).",
    "kvport_sglang_put_memory_pages_total": "Pages that could not be copied from the pool, which is smaller than it was.",
    "kvport_sglang_put_unanswered_pages_total": "Pages of puts that the agent did not answer.",
}


class Numbers:
    """Counts of this package and of the agent. Any thread may count."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._mu = threading.Lock()
        self._counters = Counters(SHIM)
        self._all = empty()
        self._untold = empty()
        self._moved: dict[str, list[tuple[int, float]]] = {"get": [], "put": []}

    def add(self, name: str, n: float = 1) -> None:
        """Count something."""
        with self._mu:
            self._counters.add(name, n)

    def moved(self, kind: str, pages: int, size: int, seconds: float) -> None:
        """Note a put or get that brought something: pages, and gigabytes a second."""
        with self._mu:
            rows = self._moved[kind]
            rows.append((pages, size / max(seconds, 1e-9) / 1e9))
            del rows[:-_MOST]

    def take_state(self, state: Any) -> None:
        """Take the agent's counters."""
        with self._mu:
            self._counters.take_state(state)

    def agents_lost(self, n: int) -> None:
        """Note that the agent has ended, or that so many did one after another."""
        with self._mu:
            self._counters.agent_lost()
            self._counters.add("kvport_sglang_agents_lost_total", n)

    def agent_left(self) -> None:
        """Note that we have left the agent."""
        with self._mu:
            self._counters.agent_lost()

    def all(self) -> dict[str, float]:
        """Give all counts since the start, and the gauges, by name and labels as Prometheus writes them."""
        with self._mu:
            self._collect()
            out = {_written(key): n for kind in ("gauges", "counts") for key, n in self._all[kind].items()}
            for key, h in self._all["histograms"].items():
                out[_written(key, "_count")], out[_written(key, "_sum")] = float(sum(h["counts"])), h["sum"]
            return out

    def take(self) -> dict[str, Any]:
        """Give what is new since the last time, as kvport_agent.stats has it."""
        with self._mu:
            self._collect()
            out, self._untold = self._untold, empty()
            return out

    def _collect(self) -> None:
        if (new := self._counters.take()) is not None:
            self._all, self._untold = merge(self._all, new), merge(self._untold, new)

    def take_moved(self) -> dict[str, list[tuple[int, float]]]:
        """Give the puts and gets since the last time."""
        with self._mu:
            out, self._moved = self._moved, {"get": [], "put": []}
            return out


def _written(key: str, more: str = "") -> str:
    name, names, values = split_key(key)
    labels = ",".join(f'{k}="{v}"' for k, v in zip(names, values, strict=True))
    return f"{name}{more}{{{labels}}}" if labels else name + more


def for_sglang(moved: dict[str, list[tuple[int, float]]]) -> Any:
    """Make what SGLang's metrics take; None where this SGLang takes nothing."""
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    out = StorageMetrics()
    for kind, pages, rates in (("get", "prefetch_pgs", "prefetch_bandwidth"), ("put", "backup_pgs", "backup_bandwidth")):
        if hasattr(out, pages) and hasattr(out, rates):
            getattr(out, pages).extend(n for n, _ in moved[kind])
            getattr(out, rates).extend(rate for _, rate in moved[kind])
    return out
