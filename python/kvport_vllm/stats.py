"""Counters of the agent and of this package, on their way to vLLM's own /metrics."""

from __future__ import annotations

from typing import Any

# A metric's identity: name, then label names and values in turn. A tuple is no key in JSON or msgpack.
_SEP = "\x1f"

# Counters of this package, except kvport_shim_faults_total, whose label nobody knows before.
SHIM = {
    "kvport_shim_agents_lost_total": "Agents that ended while the engine ran.",
    "kvport_shim_load_by_layer_off_total": "Times that load_by_layer was switched off: a rank could not wait for layers.",
    "kvport_shim_loads_by_layer_total": "Loads of which a layer was used before their end.",
    "kvport_shim_loads_failed_total": "Loads of which the connector did not bring every block.",
    "kvport_shim_loads_in_step_total": "Loads that their step waited for.",
    "kvport_shim_lookups_given_up_total": "Lookups that had no answer in time and counted as misses.",
    "kvport_shim_lookups_ahead_total": "Lookups that came ahead with another one, in its call: vLLM had not asked yet.",
    "kvport_shim_lookups_total": "Lookups that vLLM asked for and that the agent was asked for in turn: a call each.",
}
FAULTS = "kvport_shim_faults_total"


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
        self._counts: dict[str, float] = dict.fromkeys(SHIM, 0.0)  # so that the first increment is one
        self._shapes: dict[str, dict[str, Any]] = {}  # of the agent's histograms, as last seen
        self._histograms: dict[str, dict[str, Any]] = {}
        self._help: dict[str, str] = {**SHIM, FAULTS: "Exceptions that were caught in a hook: bugs of this package."}
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
            if c.help:
                self._help[c.name] = c.help
            if c.gauge:
                self._gauges[key] = c.value
            elif c.HasField("histogram"):
                self._take_histogram(key, c.histogram)
            else:
                more = c.value - self._seen.get(key, 0.0)
                if key not in self._seen or more > 0:  # zeros are told too, once
                    self._counts[key] = self._counts.get(key, 0) + more
                self._seen[key] = c.value

    def _take_histogram(self, key: str, h: Any) -> None:
        now = {"bounds": list(h.bounds), "counts": list(h.counts), "sum": h.sum}
        before = self._shapes.get(key)
        self._shapes[key] = now
        if before is not None and before["bounds"] == now["bounds"]:
            if before["counts"] == now["counts"]:
                return
            now = {
                "bounds": now["bounds"],
                "counts": [n - m for n, m in zip(now["counts"], before["counts"], strict=True)],
                "sum": now["sum"] - before["sum"],
            }
        self._histograms[key] = add_histograms(self._histograms.get(key), now)

    def agent_lost(self) -> None:
        """Note that the next agent counts from zero."""
        self._seen.clear()
        self._shapes.clear()
        self._gauges = dict.fromkeys(self._gauges, 0.0)
        self.add("kvport_shim_agents_lost_total")

    def take(self) -> dict[str, Any] | None:
        """Give what is new, or None."""
        if not self._counts and not self._gauges and not self._histograms:
            return None
        data: dict[str, Any] = {"counts": self._counts, "gauges": self._gauges, "histograms": self._histograms}
        names = {split_key(key)[0] for kind in data.values() for key in kind}
        data["help"] = {name: text for name, text in self._help.items() if name in names}
        self._counts, self._gauges, self._histograms = {}, {}, {}
        return data


def empty() -> dict[str, Any]:
    """Give an interval in which nothing happened."""
    return {"counts": {}, "gauges": {}, "histograms": {}, "help": {}}


def add_histograms(a: dict[str, Any] | None, b: dict[str, Any]) -> dict[str, Any]:
    """Add up what two intervals have observed. Of other buckets only the later ones are kept."""
    if a is None or a["bounds"] != b["bounds"]:
        return b
    return {"bounds": a["bounds"], "counts": [n + m for n, m in zip(a["counts"], b["counts"], strict=True)], "sum": a["sum"] + b["sum"]}


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Add up two intervals."""
    counts, histograms = dict(a.get("counts", {})), dict(a.get("histograms", {}))
    for key, n in b.get("counts", {}).items():
        counts[key] = counts.get(key, 0) + n
    for key, h in b.get("histograms", {}).items():
        histograms[key] = add_histograms(histograms.get(key), h)
    return {
        "counts": counts,
        "gauges": {**a.get("gauges", {}), **b.get("gauges", {})},
        "histograms": histograms,
        "help": {**a.get("help", {}), **b.get("help", {})},
    }


def spread(h: dict[str, Any]) -> list[tuple[float, int]]:
    """Give values, and how often each, that fill a histogram's buckets and have its sum.

    vLLM's metrics take single observations only. Where a value lies in its bucket is unknown; all lie at the
    same part of theirs, so that their sum is right.
    """
    bounds, counts = h["bounds"], h["counts"]
    lows = [0.0, *bounds]
    inside = list(zip(lows[:-1], bounds, counts[:-1], strict=True))
    width = sum(n * (high - low) for low, high, n in inside)
    rest = h["sum"] - sum(n * low for low, n in zip(lows, counts, strict=True))
    beyond = counts[-1]
    part = rest / width if width > 0 else 0.0
    part = min(max(part, 1e-6), 0.5 if beyond else 1.0)
    out = [(low + part * (high - low), n) for low, high, n in inside if n > 0]
    if beyond > 0:
        low = lows[-1]
        out.append((max(low + (rest - part * width) / beyond, low * (1 + 1e-6)), beyond))
    return out


def reduce(data: dict[str, Any]) -> dict[str, float]:
    """Sum over labels, for vLLM's log line."""
    out: dict[str, float] = {}
    for key, n in {**data.get("gauges", {}), **data.get("counts", {})}.items():
        if n:
            name = split_key(key)[0]
            out[name] = round(out.get(name, 0) + n, 3)
    for key, h in data.get("histograms", {}).items():
        if n := sum(h["counts"]):
            name = split_key(key)[0]
            out[name + "_count"] = out.get(name + "_count", 0) + n
            out[name + "_sum"] = round(out.get(name + "_sum", 0) + h["sum"], 3)
    return out
