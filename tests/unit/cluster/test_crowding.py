"""When more ranks than cores are worth a warning."""

from __future__ import annotations

import logging

import pytest

from placement.plan import EngineShape
from raycore.cluster import crowding as module
from raycore.cluster.crowding import crowding, warn_if_crowded

GIB = 1 << 30
INLINE = EngineShape(num_ranks=50, world_size=1, engine_cpus=0.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_more_ranks_than_cores_are_fine(num_ranks: int):
    assert crowding(INLINE, num_ranks, num_cores=2, free_bytes=0) is None


def test_the_warning_has_the_ranks_processes_cores_and_memory():
    assert crowding(INLINE, 50, num_cores=2, free_bytes=16 * GIB) == (
        "data_parallel_size=50 starts 50 processes on 2 cores. They share these, so more ranks than cores make nothing "
        "faster, and take at least 10.7 GiB besides weights and caches, of 16.0 GiB that are free"
    )


def test_workers_and_engines_count_as_processes_and_too_little_memory_is_said():
    text = crowding(EngineShape(num_ranks=3, world_size=2), 3, num_cores=2, free_bytes=GIB)
    assert text is not None
    assert text.startswith("data_parallel_size=3 starts 9 processes on 2 cores.")
    assert text.endswith("of 1.0 GiB that are free, so they won't fit")


@pytest.mark.parametrize(("gpus", "is_told"), [(0.0, True), (1.0, False)])
def test_ranks_on_gpus_need_no_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: float, is_told: bool
):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    with caplog.at_level(logging.WARNING, "raycore"):
        warn_if_crowded(EngineShape(num_ranks=50, world_size=1, gpus_per_worker=gpus), 50)
    assert ("on 2 cores" in caplog.text) is is_told
