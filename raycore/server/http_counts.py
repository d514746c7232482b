"""What has been counted of HTTP requests, as values that several servers' can be added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raycore.metrics.counts import Histogram
from raycore.metrics.prometheus import cumulative

_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0)


class HttpCounts(msgspec.Struct):
    """Since a server's start."""

    requests: dict[tuple[str, str, str], int] = {}
    """By method, class of status, and handler."""
    durations: dict[tuple[str, str], Histogram] = {}
    """By method and handler, in seconds."""

    def add(self, method: str, status: str, handler: str, duration_s: float) -> None:
        """Count a request."""
        key = method, status, handler
        self.requests[key] = self.requests.get(key, 0) + 1
        self.durations.setdefault((method, handler), Histogram(_BOUNDS_S)).observe(duration_s)


def total(parts: Iterable[HttpCounts]) -> HttpCounts:
    """Several servers' counts as one, which shares nothing with them."""
    result = HttpCounts()
    for part in parts:
        # copied first: a server counts on its own thread meanwhile
        for key, number in list(part.requests.items()):
            result.requests[key] = result.requests.get(key, 0) + number
        for key, histogram in list(part.durations.items()):
            result.durations[key] = result.durations.get(key, Histogram(_BOUNDS_S)) + histogram
    return result


class HttpCollector(Collector):
    """What a registry asks for the samples."""

    def __init__(self, read: Callable[[], HttpCounts]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: which samples there are depends on what clients ask for."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Both metrics."""
        counts = self._read()
        requests = CounterMetricFamily(
            "http_requests", "Requests by method, status and handler.", labels=("method", "status", "handler")
        )
        for labels, number in list(counts.requests.items()):
            requests.add_metric(labels, number)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's headers to its answer's end.",
            labels=("method", "handler"),
        )
        for labels, histogram in list(counts.durations.items()):
            durations.add_metric(labels, cumulative(histogram), histogram.sum)
        yield durations
