"""vLLM's wrappers of Ray's metrics."""

from __future__ import annotations

import pytest

from raycore.compat import ray_metrics
from raycore.errors import InvalidConfig


class Metric:
    """Keeps its calls, as a metric of Ray's would get them."""

    def __init__(self, *made, **options):
        self.made, self.options, self.calls = made, options, []

    def __getattr__(self, name):
        return lambda value, tags: self.calls.append((name, value, tags))


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    monkeypatch.setattr(ray_metrics, "new_metric", Metric)


def test_metrics_have_the_methods_of_prometheus():
    gauge = ray_metrics.RayGaugeWrapper("vllm:my gauge", "text", ["model", "rank"], multiprocess_mode="all")
    gauge.labels("demo", 0).set(3)
    gauge.labels(rank=1, model="demo").set(4)
    assert gauge.metric.made == ("Gauge", "vllm_my_gauge", "text", ("model", "rank"))
    tags = [{"model": "demo", "rank": "0"}, {"model": "demo", "rank": "1"}]
    assert gauge.metric.calls == [("set", 3, tags[0]), ("set", 4, tags[1])]
    counter = ray_metrics.RayCounterWrapper("tokens")
    counter.inc()
    counter.inc(0)
    assert counter.metric.calls == [("inc", 1.0, {})]
    histogram = ray_metrics.RayHistogramWrapper("seconds", buckets=[1.0, 2.0])
    histogram.observe(1.5)
    assert histogram.metric.options == {"boundaries": [1.0, 2.0]}
    assert histogram.metric.calls == [("observe", 1.5, {})]


def test_labels_that_dont_fit_are_refused():
    gauge = ray_metrics.RayGaugeWrapper("name", labelnames=["model", "rank"])
    for values, named in ((("demo",), {}), (("a", "b", "c"), {}), (("a",), {"model": "b"}), ((), {"x": 1, "rank": 2})):
        with pytest.raises(InvalidConfig, match="give a value for each of model, rank"):
            gauge.labels(*values, **named)
    with pytest.raises(InvalidConfig, match=r"call labels\(\) before: the metric has the labels model, rank"):
        gauge.set(1)
