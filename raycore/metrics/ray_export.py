"""Exports an engine's metrics through Ray, as `ray_raycore_…`, for each rank.

Each Ray node exports what its processes record. The engine's program records the metrics of all ranks. A local Ray that
raycore started exports nothing, so nothing is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from raycore.metrics.catalog import COUNTERS, GAUGES, LABELLED_COUNTERS, LABELLED_GAUGES, RESTARTS, families
from raycore.metrics.view import MetricsView
from raycore.ray_api import is_connected, metrics_port, node_id

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its tags."""


class RayExport:
    """Records an engine's metrics in Ray. Each report records the metrics that have changed since the last one."""

    def __init__(self, engine_name: str, read: Callable[[], MetricsView]) -> None:
        self._engine_name = engine_name
        self._read = read
        self._is_gathered: bool | None = None
        """Whether this node's Ray exports metrics; None until known."""
        self._metrics: dict[str, Any] = {}
        self._last_gauges: dict[Sample, float] = {}
        self._last_counters: dict[Sample, float] = {}

    def report(self) -> None:
        """Record the metrics that have changed since the last report."""
        if self._is_gathered is None:
            self._is_gathered = _node_exports()
        if not self._is_gathered or not is_connected():
            return
        gauges: dict[Sample, float] = {}
        counters: dict[Sample, float] = {}
        for family in families(self._read()):
            found = gauges if family.is_gauge else counters
            for dp_rank, labels, number in family.numbers:
                found[self._sample(family.name, dp_rank, **labels)] = float(number)
        # set the gauges of a rank that is gone to 0
        gauges = dict.fromkeys(self._last_gauges, 0.0) | gauges
        for sample, value in gauges.items():
            if value != self._last_gauges.get(sample):
                self._metric("Gauge", sample).set(value, dict(sample[1]))
                self._last_gauges[sample] = value
        for sample, value in counters.items():
            before = self._last_counters.get(sample, 0.0)
            # a smaller value belongs to a new rank with the same dp_rank, which counts from zero
            growth = value - before if value >= before else value
            if growth:
                self._metric("Counter", sample).inc(growth, dict(sample[1]))
                self._last_counters[sample] = value  # at once: the next metric may raise, and this one is recorded
        self._last_gauges, self._last_counters = gauges, counters

    def _sample(self, name: str, dp_rank: int, **tags: str) -> Sample:
        name = name.replace("vllm:", "raycore_")  # Ray allows no colons
        return name, (("engine_name", self._engine_name), ("engine", str(dp_rank)), *tags.items())

    def _metric(self, kind: str, sample: Sample) -> Any:
        name, tags = sample
        if name not in self._metrics:
            self._metrics[name] = new_metric(kind, name, _TEXTS[name], tuple(key for key, _ in tags))
        return self._metrics[name]


_TEXTS = {
    name.replace("vllm:", "raycore_"): text
    for name, text, *_ in (*GAUGES, *LABELLED_GAUGES, *COUNTERS, *LABELLED_COUNTERS, RESTARTS)
}


def new_metric(kind: str, name: str, text: str, tag_keys: tuple[str, ...], **options: Any) -> Any:
    """A metric that Ray exports: a `Counter`, a `Gauge` or a `Histogram` of `ray.util.metrics`, with its options."""
    from ray.util import metrics  # imported only if Ray exports metrics

    return getattr(metrics, kind)(name, text, tag_keys, **options)


def _node_exports() -> bool:
    """Whether the Ray node on which this process runs exports metrics."""
    try:
        return metrics_port(node_id()) > 0
    except (RayError, RuntimeError) as error:
        logger.debug("no metrics are exported through Ray: %s", error)
        return False
