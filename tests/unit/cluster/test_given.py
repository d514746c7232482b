"""Where an engine's ranks go if the caller says so, or has places itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from configs import make_config
from fake_runtime import DRIVER, FakeRuntime

from raycore.cluster.given import GivenDevices, GivenPlaces, find_given
from raycore.cluster.manager import shape_of
from raycore.config import ExecutorConfig, ParallelConfig
from raycore.errors import InvalidConfig


def group(*gpus: float) -> Any:
    return SimpleNamespace(
        id=SimpleNamespace(hex=lambda: "12ab" * 9), bundle_specs=[{"CPU": 1, **({"GPU": n} if n else {})} for n in gpus]
    )


def find(config: Any, groups: Any = None, gpus: Any = (), own: Any = None, captures: bool = True) -> GivenPlaces:
    runtime = FakeRuntime()
    runtime.gpus, runtime.group, runtime.captures = list(gpus), own, captures
    return find_given(config, groups, DRIVER, runtime)


def engine(num_ranks: int = 1, tp: int = 1, device: str = "cuda", backend: str = "ray", **parallel: Any) -> Any:
    return msgspec.structs.replace(
        make_config(),
        parallel=ParallelConfig(tp, num_ranks, **parallel),
        executor=ExecutorConfig(backend),
        device=device,
    )


OWN, BROUGHT = group(1, 1, 1, 1), group(1, 1)


@pytest.mark.parametrize("own", [None, OWN])
def test_the_callers_groups_come_first(own: Any):
    given = find(engine(2, 1), [BROUGHT, BROUGHT], gpus="01", own=own)
    assert given == GivenPlaces([BROUGHT, BROUGHT])
    given = find(engine(2, 1, placement_bundle_indices="1;0"), [BROUGHT, BROUGHT], gpus="01", own=own)
    assert given == GivenPlaces([BROUGHT, BROUGHT], [[1], [0]])


@pytest.mark.parametrize(("device", "captures"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_given_bundles_are_of_the_callers_own_group_unless_it_passes_others(device: str, captures: bool):
    given = find(engine(2, 2, device, placement_bundle_indices="3,0;1,2"), gpus="01", own=OWN, captures=captures)
    assert given == GivenPlaces([OWN, OWN], [[3, 0], [1, 2]])


def test_an_engine_uses_the_gpus_of_its_actor_if_they_are_enough():
    given = find(engine(2, 2), gpus="45678", own=OWN)
    assert given == GivenPlaces(devices=[GivenDevices(DRIVER, ["4", "5"]), GivenDevices(DRIVER, ["6", "7"])])
    assert find(engine(2, 2), gpus="456") == GivenPlaces()


def test_an_engine_uses_the_first_bundles_with_gpus_of_a_group_that_captures():
    given = find(engine(1, 2), own=group(0, 1, 0, 0.5, 1))
    assert given.indices == [[1, 3]]
    assert find(engine(1, 2), own=OWN, captures=False) == GivenPlaces()
    with pytest.raises(InvalidConfig, match=r"12ab12ab12ab, .* has GPUs in 1 of its bundles, but there are 2 workers"):
        find(engine(1, 2), own=group(0, 1))


def test_an_engine_on_cpus_has_groups_of_its_own_wherever_its_caller_runs():
    assert find(engine(device="cpu"), gpus="0", own=OWN) == GivenPlaces()


def test_named_devices_exclude_groups_and_cpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    named = {"device_ids": "1,0"}
    assert find(engine(1, 2, **named), gpus="01", own=OWN).devices == [GivenDevices(DRIVER, ["6", "5"])]
    with pytest.raises(InvalidConfig, match="device_ids='1,0' reserves nothing, and placement_groups say where"):
        find(engine(1, 2, **named), [BROUGHT])
    with pytest.raises(InvalidConfig, match="device_ids='1,0' needs GPUs, but device='cpu' was chosen here"):
        find(engine(1, 2, "cpu", **named))


@pytest.mark.parametrize(
    ("given", "device", "worker", "engine_cpus"),
    [
        (GivenPlaces(), "cuda", {"CPU": 1.0, "GPU": 0.5}, 1.0),
        (GivenPlaces([BROUGHT]), "cuda", {"CPU": 1.0, "GPU": 0.5}, 1.0),
        (GivenPlaces([BROUGHT], [[0, 1]]), "cuda", {"GPU": 0.5}, 0.0),
        (GivenPlaces([BROUGHT], [[0, 1]]), "cpu", {"CPU": 1.0}, 0.0),
    ],
)
def test_trainers_may_hold_the_cpus_of_given_bundles(given: GivenPlaces, device: str, worker: Any, engine_cpus: float):
    shape = shape_of(engine(1, 2, device, gpus_per_worker=0.5), given)
    assert (shape.worker_bundle, shape.engine_cpus) == (worker, engine_cpus)
