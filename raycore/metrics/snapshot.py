"""An engine's metrics as a list of objects, with vLLM's names, labels and classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from raycore.metrics import counts as rank_counts
from raycore.metrics.catalog import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LABELLED_GAUGES,
    RESTARTS,
    WITHOUT_RANK,
)
from raycore.metrics.view import MetricsView

_VECTORS = ("position",)
"""Labels whose values are the positions in a `Vector`."""


@dataclass
class Metric:
    """A metric. Several have the same name, with different labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Several counters in order."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float


@dataclass
class Histogram(Metric):
    """How often values were how large."""

    count: int
    """Number of values."""
    sum: float
    """Their sum."""
    buckets: dict[str, int]
    """By upper bound, as text: number of values up to it. The last bound is `+Inf`."""


def snapshot(view: MetricsView, model_name: str) -> list[Metric]:
    """Return all metrics. Each has the label `model_name`, and most have `engine`, a dp_rank."""
    return [*_gauges(view, model_name), *_counters(view, model_name), *_histograms(view, model_name)]


def _gauges(view: MetricsView, model: str) -> Iterator[Metric]:
    for rank in view.ranks:
        labels = _labels(model, rank.dp_rank)
        for name, _, value_of in GAUGES:
            yield Gauge(name, labels.copy(), float(value_of(rank)))
        for name, _, label, values in LABELLED_GAUGES:
            for value, value_of in values.items():
                yield Gauge(name, labels | {label: value}, float(value_of(rank)))
        yield Counter(RESTARTS[0], labels.copy(), rank.num_restarts)
    yield Gauge(WITHOUT_RANK[0], {"model_name": model}, float(view.num_waiting_for_rank))


def _counters(view: MetricsView, model: str) -> Iterator[Metric]:
    for dp_rank, counts in view.counts.items():
        labels = _labels(model, dp_rank)
        for name, _, field in COUNTERS:
            yield Counter(name, labels.copy(), getattr(counts, field))
        for name, _, label, values_of in LABELLED_COUNTERS:
            values = values_of(counts)
            if label in _VECTORS:
                if values:
                    yield Vector(name, labels.copy(), list(values.values()))
            else:
                for value, number in values.items():
                    yield Counter(name, labels | {label: value}, number)


def _histograms(view: MetricsView, model: str) -> Iterator[Metric]:
    for dp_rank, counts in view.counts.items():
        for name, _, field in HISTOGRAMS:
            found: rank_counts.BucketCounts = getattr(counts, field)
            bounds = [*map(str, found.bounds), "+Inf"]
            buckets = dict(zip(bounds, accumulate(found.counts), strict=True))
            yield Histogram(name, _labels(model, dp_rank), found.count, found.sum, buckets)


def _labels(model: str, dp_rank: int) -> dict[str, str]:
    return {"model_name": model, "engine": str(dp_rank)}
