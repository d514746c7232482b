"""Counts of HTTP requests, as values that can be summed over several servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raycore.metrics.counts import BucketCounts
from raycore.metrics.prometheus import cumulative

_BOUNDS_OF_OPERATIONS_S = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0)


Operation = tuple[str, str]
"""Its kind, `SLEEP_MODE` or `WEIGHT_UPDATE`, and its name."""
SLEEP_MODE, WEIGHT_UPDATE = "sleep_mode", "rl_weight_update"
_KINDS = {
    SLEEP_MODE: (
        "vllm:sleep_mode_operation_duration_seconds",
        "vllm:sleep_mode_operations_in_flight",
        "requests that put the engine to sleep or wake it up",
    ),
    WEIGHT_UPDATE: (
        "vllm:rl_weight_update_operation_duration_seconds",
        "vllm:rl_weight_update_operations_in_flight",
        "requests that change the weights",
    ),
}


class HttpCounts(msgspec.Struct):
    """Counts since a server's start."""

    requests: dict[tuple[str, str, str], int] = {}
    """Number of requests, by method, class of status (such as `2xx`), and handler."""
    durations: dict[tuple[str, str], BucketCounts] = {}
    """Durations of requests in seconds, by method and handler."""

    operations: dict[Operation, BucketCounts] = {}
    """Durations of operations in seconds."""
    in_flight: dict[Operation, int] = {}
    """Number of operations that run."""

    @contextmanager
    def operation(self, kind: str, name: str) -> Generator[None, None, None]:
        """Count what the block does as an operation."""
        key, started_s = (kind, name), time.perf_counter()
        self.in_flight[key] = self.in_flight.get(key, 0) + 1
        try:
            yield
        finally:
            self.in_flight[key] -= 1
            durations = self.operations.setdefault(key, BucketCounts(_BOUNDS_OF_OPERATIONS_S))
            durations.observe(time.perf_counter() - started_s)

    def add(self, method: str, status: str, handler: str, duration_s: float) -> None:
        """Count a request."""
        key = method, status, handler
        self.requests[key] = self.requests.get(key, 0) + 1
        self.durations.setdefault((method, handler), BucketCounts(_BOUNDS_S)).observe(duration_s)


def total(parts: Iterable[HttpCounts]) -> HttpCounts:
    """The sum of several servers' counts, as a new object."""
    result = HttpCounts()
    for part in parts:
        # iterate over copies: the servers keep counting on their own threads
        for key, number in list(part.requests.items()):
            result.requests[key] = result.requests.get(key, 0) + number
        for key, histogram in list(part.durations.items()):
            result.durations[key] = result.durations.get(key, BucketCounts(_BOUNDS_S)) + histogram
        for key, histogram in list(part.operations.items()):
            result.operations[key] = result.operations.get(key, BucketCounts(_BOUNDS_OF_OPERATIONS_S)) + histogram
        for key, number in list(part.in_flight.items()):
            result.in_flight[key] = result.in_flight.get(key, 0) + number
    return result


class HttpCollector(Collector):
    """The collector that a Prometheus registry asks for the samples of HTTP requests."""

    def __init__(self, read: Callable[[], HttpCounts]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which samples exist depends on the requests."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counter of requests, the histogram of their durations, and the metrics of operations."""
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
        for kind, (durations_name, in_flight_name, what) in _KINDS.items():
            operations = HistogramMetricFamily(durations_name, f"Durations of {what}.", labels=("operation",))
            for key, histogram in list(counts.operations.items()):
                if key[0] == kind:
                    operations.add_metric(key[1:], cumulative(histogram), histogram.sum)
            yield operations
            in_flight = GaugeMetricFamily(in_flight_name, f"Running {what}.", labels=("operation",))
            for key, number in list(counts.in_flight.items()):
                if key[0] == kind:
                    in_flight.add_metric(key[1:], number)
            yield in_flight
