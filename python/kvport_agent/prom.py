"""What stats has counted, as metrics of prometheus_client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import stats


class Metrics:
    """Makes each metric when it is first seen: which ones there are is the agent's business."""

    def __init__(self, counter: Any, gauge: Any, histogram: Any, labels: Sequence[str]) -> None:
        """Take what makes metrics of each type, and the labels that all of them have."""
        self._types = {"counts": counter, "gauges": gauge, "histograms": histogram}
        self._labels = labels
        self._made: dict[str, Any] = {}

    def observe(self, data: dict[str, Any], values: Sequence[Any]) -> None:
        """Record an interval, with the values of those labels."""
        text = data.get("help", {})
        for kind in self._types:
            for key, value in data.get(kind, {}).items():
                name, names, own = stats.split_key(key)
                buckets = {"buckets": value["bounds"]} if kind == "histograms" else {}
                metric = self._metric(kind, name, names, text.get(name, ""), **buckets)
                if metric is not None:
                    self._record(kind, metric.labels(*values, *own), value)

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
                self._made[key] = self._types[kind](name=name, documentation=text, labelnames=[*self._labels, *names], **more)
            except ValueError:  # the name is taken with other labels: rather none than a broken page
                self._made[key] = None
        return self._made[key]
