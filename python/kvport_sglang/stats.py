"""What becomes of pages: for SGLang's metrics, and for whoever asks."""

from __future__ import annotations

import threading
from typing import Any

# Intervals longer than this many calls lose their first ones: SGLang asks with every step.
_MOST = 1024


class Numbers:
    """Counts of this package and of the agent. Any thread may count."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._mu = threading.Lock()
        self._counts: dict[str, float] = {}
        self._agent: dict[str, float] = {}
        self._past: dict[str, float] = {}  # of agents that have ended
        self._moved: dict[str, list[tuple[int, float]]] = {"get": [], "put": []}

    def add(self, name: str, n: float = 1) -> None:
        """Count something."""
        with self._mu:
            self._counts[name] = self._counts.get(name, 0) + n

    def moved(self, kind: str, pages: int, size: int, seconds: float) -> None:
        """Note a put or get that brought something: pages, and gigabytes a second."""
        with self._mu:
            rows = self._moved[kind]
            rows.append((pages, size / max(seconds, 1e-9) / 1e9))
            del rows[:-_MOST]

    def take_state(self, state: Any) -> None:
        """Take the agent's counters."""
        if not state.counters:
            return
        now = {}
        for c in state.counters:
            labels = ",".join(f'{k}="{v}"' for k, v in zip(c.labels[::2], c.labels[1::2], strict=True))
            name = f"{c.name}{{{labels}}}" if labels else str(c.name)
            if c.HasField("histogram"):
                now[f"{name}_count"], now[f"{name}_sum"] = float(sum(c.histogram.counts)), c.histogram.sum
            else:
                now[name] = c.value
        with self._mu:
            self._agent = now

    def agent_lost(self) -> None:
        """Note that the next agent counts from zero."""
        with self._mu:
            for name, n in self._agent.items():
                self._past[name] = self._past.get(name, 0) + n
            self._agent = {}

    def all(self) -> dict[str, float]:
        """Give all counts since the start."""
        with self._mu:
            out = {**self._past, **self._counts}
            for name, n in self._agent.items():
                out[name] = out.get(name, 0) + n
            return out

    def take_moved(self) -> dict[str, list[tuple[int, float]]]:
        """Give the puts and gets since the last time."""
        with self._mu:
            out, self._moved = self._moved, {"get": [], "put": []}
            return out


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
