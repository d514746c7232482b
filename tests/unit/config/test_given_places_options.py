"""Bundles and devices that the caller gives: their forms, their numbers, and vLLM's variables for them."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.compat import environment
from raycore.config import ParallelConfig, resolve
from raycore.config.given_places import device_ids
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def parallel(**options: Any) -> ParallelConfig:
    return resolve(demo_model_path(), **options).parallel


@pytest.mark.parametrize(
    ("given", "num_ranks", "tp", "expected"),
    [
        (None, 1, 1, None),
        ([3], 1, 1, [[3]]),
        ([[3]], 1, 1, [[3]]),
        ([[0, 1], [5, 4]], 2, 2, [[0, 1], [5, 4]]),
        ("0, 1; 5, 4", 2, 2, [[0, 1], [5, 4]]),
        ("0,1,5,4", 2, 2, [[0, 1], [5, 4]]),
    ],
)
def test_bundles_are_given_for_each_worker_of_each_rank(given, num_ranks, tp, expected):
    shape = {"data_parallel_size": num_ranks, "tensor_parallel_size": tp}
    assert parallel(placement_bundle_indices=given, **shape).bundle_indices == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 1]], "'0,1' .*doesn't fit data_parallel_size=2 with 2 workers in each rank: .* such as '0,1;2,3'"),
        ([[0], [1]], "'0;1' .*doesn't fit data_parallel_size=2"),
        ([[0, 0], [1, 2]], "has bundle 0 twice in one rank"),
        ([[0, -1], [1, 2]], "isn't lists of numbers of bundles, one list for each rank"),
        ("one", "'one' isn't lists of numbers of bundles"),
        (0, "=0 isn't lists of numbers of bundles"),
    ],
)
def test_bundles_that_do_not_fit_the_ranks_are_refused(given, message):
    with pytest.raises(InvalidConfig, match=message):
        parallel(placement_bundle_indices=given, data_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("given", "visible", "expected"),
    [
        ([1, 0], None, [["1"], ["0"]]),
        ("1,0", "4,7", [["7"], ["4"]]),
        (["GPU-12ab", "GPU-34cd"], "4,7", [["GPU-12ab"], ["GPU-34cd"]]),
        ([0, 1], "GPU-12ab,GPU-34cd", [["GPU-12ab"], ["GPU-34cd"]]),
    ],
)
def test_numbers_of_devices_are_places_among_those_that_are_visible(given, visible, expected):
    chosen = parallel(device_ids=given, data_parallel_size=2)
    assert device_ids(chosen, visible) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": [0]}, "device_ids='0' has 1 different devices, but there are 2 workers"),
        ({"device_ids": [1, 1]}, "device_ids='1,1' has 1 different devices"),
        ({"device_ids": [0, 2]}, "there is no device 2, because CUDA_VISIBLE_DEVICES='4,7' has 2"),
        ({"device_ids": [0, 1], "device": "cpu"}, "device_ids='0,1' needs GPUs, and device='cpu'"),
        ({"device_ids": [0, 1], "placement_bundle_indices": [[0], [1]]}, "placement_bundle_indices='0;1' says where"),
    ],
)
def test_devices_that_workers_can_not_have_are_refused(monkeypatch: pytest.MonkeyPatch, options, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with pytest.raises(InvalidConfig, match=message):
        parallel(data_parallel_size=2, **options)


def test_vllms_variables_are_defaults(monkeypatch: pytest.MonkeyPatch):
    assert (environment.VLLM_RAY_BUNDLE_INDICES, environment.VLLM_RAY_PER_WORKER_GPUS) == ("", 1.0)
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "2, 0")
    monkeypatch.setenv("VLLM_RAY_PER_WORKER_GPUS", "0.2")
    assert (environment.VLLM_RAY_BUNDLE_INDICES, environment.VLLM_RAY_PER_WORKER_GPUS) == ("2, 0", 0.2)
    chosen = parallel(tensor_parallel_size=2)
    assert (chosen.bundle_indices, chosen.gpus_per_worker) == ([[2, 0]], 0.2)
    chosen = parallel(placement_bundle_indices=[[1]], gpus_per_worker=0.5)
    assert (chosen.bundle_indices, chosen.gpus_per_worker) == ([[1]], 0.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_RAY_BUNDLE_INDICES", "0,x", "VLLM_RAY_BUNDLE_INDICES='0,x' isn't numbers of bundles"),
        ("VLLM_RAY_BUNDLE_INDICES", "0,1", r"VLLM_RAY_BUNDLE_INDICES\) doesn't fit .* with 1 worker in each rank"),
        ("VLLM_RAY_PER_WORKER_GPUS", "2", "VLLM_RAY_PER_WORKER_GPUS='2' isn't a number above 0, at most 1"),
        ("VLLM_RAY_PER_WORKER_GPUS", "half", "VLLM_RAY_PER_WORKER_GPUS='half' isn't a number"),
    ],
)
def test_values_of_vllms_variables_that_make_no_sense_are_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig, match=message):
        parallel()
