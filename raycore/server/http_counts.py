"""Counts of HTTP requests, as values that can be summed over several servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raycore.metrics.counts import Histogram
from raycore.metrics.prometheus import cumulative

_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0)


class HttpCounts(msgspec.Struct):
    """Counts since a server's start."""

    requests: dict[tuple[str, str, str], int] = {}
    """Number of requests, by method, class of status (such as `2xx`), and handler."""
    durations: dict[tuple[str, str], Histogram] = {}
    """Durations of requests in seconds, by method and handler."""

    def add(self, method: str, status: str, handler: str, duration_s: float) -> None:
        """Count a request."""
        key = method, status, handler
        self.requests[key] = self.requests.get(key, 0) + 1
        self.durations.setdefault((method, handler), Histogram(_BOUNDS_S)).observe(duration_s)


def total(parts: Iterable[HttpCounts]) -> HttpCounts:
    """The sum of several servers' counts, as a new object."""
    result = HttpCounts()
    for part in parts:
        # iterate over copies: the servers keep counting on their own threads
        for key, number in list(part.requests.items()):
            result.requests[key] = result.requests.get(key, 0) + number
        for key, histogram in list(part.durations.items()):
            result.durations[key] = result.durations.get(key, Histogram(_BOUNDS_S)) + histogram
    return result


class HttpCollector(Collector):
    """The collector that a Prometheus registry asks for the samples of HTTP requests."""

    def __init__(self, read: Callable[[], HttpCounts]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which samples exist depends on the requests."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counter of requests and the histogram of their durations."""
        counts = self._read()
        requests = CounterMetricFamily(
            "http_requests", "Requests by method, status and handler.", labels=("method", "status", "handler")
        )
        for labels, number in list(counts.requests.items()):
            requests.add_metric(labels, number)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's headers to the end of its response.",
            labels=("method", "handler"),
        )
        for labels, histogram in list(counts.durations.items()):
            durations.add_metric(labels, cumulative(histogram), histogram.sum)
        yield durations
