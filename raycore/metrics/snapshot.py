"""An engine's metrics as a list of objects, with vLLM's names, labels and classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from raycore.metrics import counts as rank_counts
from raycore.metrics.catalog import HISTOGRAMS, WITHOUT_RANK, MetricFamily, families
from raycore.metrics.view import MetricsView

_VECTOR = ("position",)
"""The labels of counters that are a `Vector`, whose positions are their values."""


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
    waiting = Gauge(WITHOUT_RANK[0], {"model_name": model_name}, float(view.num_waiting_for_rank))
    numbers = [metric for family in families(view) for metric in _metrics(family, model_name)]
    return [*numbers, waiting, *_histograms(view, model_name)]


def _metrics(family: MetricFamily, model: str) -> Iterator[Metric]:
    if family.labels == _VECTOR:
        for dp_rank, numbers in groupby(family.numbers, key=lambda each: each[0]):
            yield Vector(family.name, _labels(model, dp_rank), [int(number) for _, _, number in numbers])
        return
    for dp_rank, labels, number in family.numbers:
        own = _labels(model, dp_rank) | labels
        yield Gauge(family.name, own, float(number)) if family.is_gauge else Counter(family.name, own, int(number))


def _histograms(view: MetricsView, model: str) -> Iterator[Metric]:
    for dp_rank, counts in view.counts.items():
        for name, _, field in HISTOGRAMS:
            found: rank_counts.BucketCounts = getattr(counts, field)
            bounds = [*map(str, found.bounds), "+Inf"]
            buckets = dict(zip(bounds, accumulate(found.counts), strict=True))
            yield Histogram(name, _labels(model, dp_rank), found.count, found.sum, buckets)


def _labels(model: str, dp_rank: int) -> dict[str, str]:
    return {"model_name": model, "engine": str(dp_rank)}
