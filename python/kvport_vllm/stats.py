"""Counters of the agent and of this package, on their way to vLLM's own /metrics."""

from __future__ import annotations

from typing import Any

# A metric's identity: name, then label names and values in turn. A tuple is no key in JSON or msgpack.
_SEP = "\x1f"


def key_of(name: str, labels: list[str]) -> str:
    """Make one string of a name and its labels."""
    return _SEP.join([name, *labels])


def split_key(key: str) -> tuple[str, list[str], list[str]]:
    """Give name, label names and label values."""
    name, *labels = key.split(_SEP)
    return name, labels[::2], labels[1::2]


class Counters:
    """What is to be told since the last time. The agent counts from its own start, we from the engine's."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._seen: dict[str, float] = {}  # of the agent's counters
        self._counts: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, int] = {}

    def add(self, name: str, n: float = 1, labels: list[str] | None = None) -> None:
        """Count something that this package did."""
        key = key_of(name, labels or [])
        self._counts[key] = self._counts.get(key, 0) + n

    def total(self, name: str, value: int, labels: list[str] | None = None) -> None:
        """Bring a counter that is kept elsewhere up to its value."""
        key = key_of(name, labels or [])
        if value > (before := self._totals.get(key, 0)):
            self._totals[key] = value
            self.add(name, value - before, labels)

    def take_state(self, state: Any) -> None:
        """Take the agent's counters."""
        for c in state.counters:
            key = key_of(c.name, list(c.labels))
            if c.gauge:
                self._gauges[key] = c.value
                continue
            more = c.value - self._seen.get(key, 0.0)
            self._seen[key] = c.value
            if more > 0:
                self._counts[key] = self._counts.get(key, 0) + more

    def agent_lost(self) -> None:
        """Note that the next agent counts from zero."""
        self._seen.clear()
        self._gauges = dict.fromkeys(self._gauges, 0.0)
        self.add("kvport_shim_agents_lost_total")

    def take(self) -> dict[str, Any] | None:
        """Give what is new, or None."""
        if not self._counts and not self._gauges:
            return None
        data: dict[str, Any] = {"counts": self._counts, "gauges": self._gauges}
        self._counts, self._gauges = {}, {}
        return data


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Add up two intervals."""
    counts = dict(a.get("counts", {}))
    for key, n in b.get("counts", {}).items():
        counts[key] = counts.get(key, 0) + n
    return {"counts": counts, "gauges": {**a.get("gauges", {}), **b.get("gauges", {})}}


def reduce(data: dict[str, Any]) -> dict[str, float]:
    """Sum over labels, for vLLM's log line."""
    out: dict[str, float] = {}
    for key, n in {**data.get("gauges", {}), **data.get("counts", {})}.items():
        name = split_key(key)[0]
        out[name] = round(out.get(name, 0) + n, 3)
    return out
