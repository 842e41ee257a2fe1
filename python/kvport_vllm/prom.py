"""vLLM's classes around stats: what travels to the API server, and what /metrics shows there."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as _metrics

from . import stats

_KVConnectorStats: Any = _metrics.KVConnectorStats
_KVConnectorPromMetrics: Any = getattr(_metrics, "KVConnectorPromMetrics", object)


class KvportStats(_KVConnectorStats):  # type: ignore[misc]
    """Counters, gauges and histograms of one interval."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = stats.empty()

    def aggregate(self, other: Any) -> KvportStats:
        """Add another interval."""
        self.data = stats.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, float]:
        """Sum over labels, for vLLM's log line."""
        return stats.reduce(self.data)

    def is_empty(self) -> bool:
        """Say whether there is nothing to tell."""
        return not any(self.data.get(kind) for kind in ("counts", "gauges", "histograms"))


class KvportPromMetrics(_KVConnectorPromMetrics):  # type: ignore[misc]
    """Makes each metric when it is first seen: which ones there are is the agent's business."""

    def __init__(self, config: Any, types: Any, labels: list[str], per_engine: dict[int, list[object]]) -> None:
        """Take vLLM's metric types and the labels that all its metrics have."""
        super().__init__(config, types, labels, per_engine)
        self._types = {"counts": types[Counter], "gauges": types[Gauge], "histograms": types[Histogram]}
        self._made: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record an interval."""
        text = transfer_stats_data.get("help", {})
        for kind in self._types:
            for key, value in transfer_stats_data.get(kind, {}).items():
                name, names, values = stats.split_key(key)
                buckets = {"buckets": value["bounds"]} if kind == "histograms" else {}
                metric = self._metric(kind, name, names, text.get(name, ""), **buckets)
                if metric is not None:
                    self._record(kind, metric.labels(*self.per_engine_labelvalues[engine_idx], *values), value)

    @staticmethod
    def _record(kind: str, child: Any, value: Any) -> None:
        if kind == "counts":
            child.inc(value)
        elif kind == "gauges":
            child.set(value)
        else:
            for observed, n in stats.spread(value):
                for _ in range(n):
                    child.observe(observed)

    def _metric(self, kind: str, name: str, names: list[str], text: str, **more: Any) -> Any:
        key = stats.key_of(name, names)
        if key not in self._made:
            try:
                text = text or "Of kvport's agent, see its docs/metrics.md."
                self._made[key] = self._types[kind](name=name, documentation=text, labelnames=[*self._labelnames, *names], **more)
            except ValueError:  # the name is taken with other labels: rather none than a broken page
                self._made[key] = None
        return self._made[key]
