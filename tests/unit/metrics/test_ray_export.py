"""What a `RayExport` records through Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from raycore.metrics import ray_export
from raycore.metrics.counts import RankCounts
from raycore.metrics.ray_export import RayExport
from raycore.metrics.view import MetricsView
from raycore.status import RankStatus


class FakeMetric:
    def __init__(self, name: str, text: str, keys: tuple[str, ...]) -> None:
        assert text
        self.name, self.keys = name, keys
        self.told: list[tuple[float, dict[str, str]]] = []

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.keys
        self.told.append((value, tags))

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self.set(value, tags)


@pytest.fixture
def recorded(monkeypatch) -> dict[str, FakeMetric]:
    """What is recorded through Ray, by name."""
    metrics: dict[str, FakeMetric] = {}

    def make(name: str, *args) -> FakeMetric:
        assert name not in metrics
        return metrics.setdefault(name, FakeMetric(name, *args))

    monkeypatch.setattr(ray_export, "_node_exports", lambda: True)
    monkeypatch.setattr(ray_export, "is_connected", lambda: True)
    monkeypatch.setattr("ray.util.metrics.Gauge", make)
    monkeypatch.setattr("ray.util.metrics.Counter", make)
    return metrics


def view(num_running: int = 0, num_output: int = 0, num_ranks: int = 1) -> MetricsView:
    counts = {dp_rank: RankCounts.empty(100) for dp_rank in range(num_ranks)}
    counts[0].num_output_tokens = num_output
    ranks = [RankStatus(dp_rank, "serving", [], num_running=num_running) for dp_rank in range(num_ranks)]
    return MetricsView(ranks, counts, [], 0)


def test_only_changed_metrics_are_recorded_in_ray(recorded):
    now = view(num_running=2, num_output=10)
    export = RayExport("e", lambda: now)
    tags = {"engine_name": "e", "engine": "0"}
    export.report()
    assert recorded["raycore_num_requests_running"].told == [(2.0, tags)]
    assert recorded["raycore_generation_tokens"].told == [(10.0, tags)]
    assert "raycore_num_preemptions" not in recorded
    export.report()
    now = view(num_running=2, num_output=15)
    export.report()
    assert recorded["raycore_num_requests_running"].told == [(2.0, tags)]
    assert recorded["raycore_generation_tokens"].told[1:] == [(5.0, tags)]


def test_the_gauges_of_a_removed_rank_are_set_to_zero(recorded):
    now = view(num_running=2, num_ranks=2)
    export = RayExport("e", lambda: now)
    export.report()
    now = replace(now, ranks=now.ranks[:1])
    for _ in range(2):
        export.report()
    of_gone = [value for value, tags in recorded["raycore_num_requests_running"].told if tags["engine"] == "1"]
    assert of_gone == [2.0, 0.0]


def test_the_counters_of_a_new_rank_with_a_used_dp_rank_begin_at_zero(recorded):
    now = view(num_output=10)
    export = RayExport("e", lambda: now)
    for num_output in (10, 0, 3):
        now = view(num_output=num_output)
        export.report()
    assert [value for value, _ in recorded["raycore_generation_tokens"].told] == [10.0, 3.0]


def test_what_was_recorded_before_a_metric_raised_is_not_recorded_again(recorded, monkeypatch):
    now = view(num_running=2, num_output=10)
    now.counts[0].num_prompt_tokens = 4
    export = RayExport("e", lambda: now)
    with monkeypatch.context() as failing:
        failing.setattr(FakeMetric, "inc", _fails_for("raycore_generation_tokens"))
        with pytest.raises(MemoryError):
            export.report()
    export.report()
    told = {name: [value for value, _ in metric.told] for name, metric in recorded.items() if metric.told}
    assert told["raycore_num_requests_running"] == [2.0]
    assert told["raycore_prompt_tokens"] == [4.0]
    assert told["raycore_generation_tokens"] == [10.0]


def _fails_for(name: str) -> Callable[..., None]:
    original = FakeMetric.inc

    def inc(self: FakeMetric, value: float, tags: dict[str, str]) -> None:
        if self.name == name:
            raise MemoryError("there is no memory")
        original(self, value, tags)

    return inc


def test_no_metric_is_recorded_if_ray_exports_none(recorded, monkeypatch):
    monkeypatch.setattr(ray_export, "_node_exports", lambda: False)
    RayExport("e", lambda: view(num_running=2)).report()
    assert recorded == {}
