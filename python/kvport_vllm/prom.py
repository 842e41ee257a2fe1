"""vLLM's classes around stats: what travels to the API server, and what /metrics shows there."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as _metrics

from kvport_agent import stats
from kvport_agent.prom import Metrics

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
    """Shows intervals on vLLM's page, by the engine that they are of."""

    def __init__(self, config: Any, types: Any, labels: list[str], per_engine: dict[int, list[object]]) -> None:
        """Take vLLM's metric types and the labels that all its metrics have."""
        super().__init__(config, types, labels, per_engine)
        self._metrics = Metrics(types[Counter], types[Gauge], types[Histogram], labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record an interval."""
        self._metrics.observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])
