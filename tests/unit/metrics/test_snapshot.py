"""Metrics as objects with vLLM's names."""

from __future__ import annotations

import pytest
from metric_views import make_view
from prometheus_client.registry import CollectorRegistry

from raycore.metrics.prometheus import EngineCollector
from raycore.metrics.snapshot import Counter, Gauge, Histogram, Vector, snapshot
from raycore.metrics.view import MetricsView


@pytest.fixture
def view() -> MetricsView:
    view = make_view(num_running=3)
    counts = view.counts[0]
    counts.num_output_tokens = 7
    counts.num_finished["stop"] = 2
    counts.num_accepted_per_position = [5, 3]
    counts.first_token_s.observe(0.003)
    counts.first_token_s.observe(0.5, times=2)
    return view


def test_metrics_are_counters_gauges_histograms_and_vectors(view: MetricsView) -> None:
    found = snapshot(view, "m")
    labels = {"model_name": "m", "engine": "0"}
    assert Counter("vllm:generation_tokens", labels, 7) in found
    assert Counter("vllm:request_success", labels | {"finished_reason": "stop"}, 2) in found
    assert Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, [5, 3]) in found
    assert Gauge("vllm:num_requests_running", labels, 3.0) in found
    assert Gauge("raycore_requests_without_rank", {"model_name": "m"}, 0.0) in found
    [histogram] = [each for each in found if each.name == "vllm:time_to_first_token_seconds"]
    assert isinstance(histogram, Histogram)
    assert (histogram.count, histogram.sum) == (3, 1.003)
    assert [histogram.buckets[bound] for bound in ("0.001", "0.005", "0.25", "0.5", "+Inf")] == [0, 1, 1, 3, 3]


def test_metrics_are_those_that_prometheus_gets(view: MetricsView) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: view, "m"))
    for metric in snapshot(view, "m"):
        if isinstance(metric, Counter):
            assert registry.get_sample_value(f"{metric.name}_total", metric.labels) == metric.value
        elif isinstance(metric, Gauge):
            assert registry.get_sample_value(metric.name, metric.labels) == metric.value
        elif isinstance(metric, Histogram):
            assert registry.get_sample_value(f"{metric.name}_count", metric.labels) == metric.count
            for bound, number in metric.buckets.items():
                sample = registry.get_sample_value(f"{metric.name}_bucket", metric.labels | {"le": bound})
                assert sample == number
