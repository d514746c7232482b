"""The metrics of all engines of a process."""

from __future__ import annotations

import gc

from raycore.metrics.engines import add_engine, get_metrics_snapshot
from raycore.metrics.snapshot import Counter, Metric


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.unavailable_reason: str | None = None

    def get_metrics(self) -> list[Metric]:
        return [Counter("requests", {"tested": self.name}, 1)]


def names() -> list[str]:
    return [each.labels["tested"] for each in get_metrics_snapshot() if "tested" in each.labels]


def test_the_snapshot_has_the_metrics_of_the_engines_that_run_and_are_referred_to() -> None:
    engines = [Engine("b"), Engine("a"), Engine("c")]
    for each in engines:
        add_engine(each)
    assert names() == ["a", "b", "c"]
    engines[1].unavailable_reason = "it was shut down"
    del engines[2], each
    gc.collect()
    assert names() == ["b"]
