"""Engines in bundles and on GPUs that the caller gives: several on one GPU, beside trainers, and after failures.

The cluster declares 4 GPUs, which the machine doesn't have: workers compute on its CPUs.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray
from cpu_worker import CpuWorker
from fake_ranks import free_resources, has_free, live_groups
from job_cluster import eventually
from ray.exceptions import ActorDiedError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from waiting import LONG_S

from placement.topology import free_in_group
from raycore import LLM, AsyncLLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InvalidConfig
from raycore.messages import EngineInfo

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

LIMITS: dict[str, Any] = {
    "max_model_len": 128,
    "num_threads": 1,
    "kv_cache_memory_bytes": 1 << 24,
    "use_tqdm_on_load": False,
    "device": "cuda",
    "worker_cls": CpuWorker,
    "placement_timeout_s": 10.0,
}
VARIABLES = {"VLLM_RAY_BUNDLE_INDICES": "1,0", "VLLM_RAY_PER_WORKER_GPUS": "0.2"}


@pytest.fixture
def make_group(ray_cluster):
    """Make placement groups. They must be there when the engines have ended, alone, unless the test removes them."""

    def make(*bundles: dict[str, float]) -> PlacementGroup:
        groups.append(placement_group([*bundles]))
        assert groups[-1].wait(LONG_S)
        return groups[-1]

    groups: list[PlacementGroup] = []
    before = free_resources()
    yield make
    own = [group.id.hex() for group in groups]
    assert all(group["placement_group_id"] in own for group in live_groups()), "raycore has left a group"
    for group in groups:
        remove_placement_group(group)
    eventually(lambda: has_free(ray.available_resources(), before), lambda: (before, ray.available_resources()))


@ray.remote
class Trainer:
    """Holds a part of a GPU."""

    def gpu(self) -> str:
        (gpu,) = ray.get_gpu_ids()
        return str(gpu)


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
    )


def train(group: PlacementGroup, num_gpus: float) -> tuple[list[Any], list[str]]:
    """A trainer in each bundle, with all CPUs and a part of the GPU. Returns their handles and their GPUs."""
    trainers = [
        Trainer.options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=in_bundle(group, index)).remote()
        for index in range(group.bundle_count)
    ]
    return trainers, ray.get([trainer.gpu.remote() for trainer in trainers])


def gpus_left(group: PlacementGroup) -> list[float]:
    """What is free of each bundle's GPU."""
    free = free_in_group(group.id.hex())
    return [round(free.get((index, "GPU"), 0.0), 3) for index in range(group.bundle_count)]


def answer(llm: LLM) -> set[str]:
    outputs = llm.generate(["27 + 58 ="] * 4, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return {output.outputs[0].text for output in outputs}


def lose(llm: LLM, dp_rank: int) -> EngineInfo:
    """Kill a rank, and return what its successor says."""
    victim = llm.engine_infos[dp_rank]
    os.kill(victim.worker_pids[-1], signal.SIGKILL)

    def successor() -> EngineInfo | None:
        found = [info for info in llm.engine_infos if info.dp_rank == dp_rank and info.pid != victim.pid]
        return found[0] if found else None

    return eventually(successor, lambda: str(llm.ranks))


@ray.remote(num_cpus=0)
class Caller:
    """Has an engine, as the rollout actors of a training program have."""

    def __init__(self, environment: dict[str, str], **options: Any) -> None:
        os.environ.update(environment)
        self.llm = LLM(demo_model_path(), **LIMITS | options)

    def gpus(self) -> list[list[str]]:
        return [info.gpu_ids for info in self.llm.engine_infos]

    def own_gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def lose(self) -> list[str]:
        """The GPUs of rank 0's successor, which must answer."""
        gpus = lose(self.llm, 0).gpu_ids
        assert answer(self.llm) == {" 85"}
        return gpus

    def shut_down(self) -> None:
        self.llm.shutdown()


def end(actor: Any) -> None:
    ray.get(actor.shut_down.remote())
    ray.kill(actor)


# ---- bundles


@pytest.mark.parametrize("indices", [[[2], [0]], "2;0", [2, 0]])
def test_ranks_use_the_given_bundles_of_one_group_also_after_a_failure(make_group, indices: Any):
    group = make_group(*[{"GPU": 1}] * 3)
    places = {"placement_groups": [group] * 2, "placement_bundle_indices": indices}
    with LLM(demo_model_path(), data_parallel_size=2, **LIMITS, **places) as llm:
        assert answer(llm) == {" 85"}
        assert gpus_left(group) == [0, 1, 0]
        before = [info.gpu_ids for info in llm.engine_infos]
        if indices == [[2], [0]]:
            assert lose(llm, 1).gpu_ids == before[1]
            assert gpus_left(group) == [0, 1, 0]
            assert answer(llm) == {" 85"}
            llm.scale(1)
            eventually(lambda: gpus_left(group) == [1, 1, 0])
            llm.scale(2)
            assert gpus_left(group) == [0, 1, 0]
            assert len(live_groups()) == 1
    eventually(lambda: gpus_left(group) == [1, 1, 1])
    (left,) = live_groups()
    assert (left["placement_group_id"], left["state"]) == (group.id.hex(), "CREATED")


def test_four_ranks_of_two_engines_share_two_gpus_with_trainers(make_group):
    group = make_group(*[{"CPU": 1, "GPU": 1}] * 2)
    trainers, gpus = train(group, 0.6)
    options = LIMITS | {"gpus_per_worker": 0.2, "placement_groups": [group] * 2}
    with (
        LLM(demo_model_path(), data_parallel_size=2, placement_bundle_indices=[[0], [1]], **options) as first,
        LLM(demo_model_path(), data_parallel_size=2, placement_bundle_indices=[[1], [0]], **options) as second,
    ):
        assert gpus_left(group) == [0, 0]
        assert [info.gpu_ids for info in first.engine_infos] == [[gpus[0]], [gpus[1]]]
        assert [info.gpu_ids for info in second.engine_infos] == [[gpus[1]], [gpus[0]]]
        assert lose(second, 0).gpu_ids == [gpus[1]]
        assert answer(first) == answer(second) == {" 85"}
        assert gpus_left(group) == [0, 0]
    eventually(lambda: gpus_left(group) == [0.4, 0.4])
    assert ray.get([trainer.gpu.remote() for trainer in trainers]) == gpus, "trainers live on"
    assert [each["state"] for each in live_groups()] == ["CREATED"]


def test_ranks_with_worker_actors_have_no_bundle_for_their_engine(make_group):
    group = make_group(*[{"CPU": 1, "GPU": 1}] * 4)
    _, gpus = train(group, 0.5)
    places = {"placement_groups": [group] * 2, "placement_bundle_indices": [[3, 0], [1, 2]], "gpus_per_worker": 0.5}
    with LLM(demo_model_path(), data_parallel_size=2, tensor_parallel_size=2, **LIMITS, **places) as llm:
        assert [info.gpu_ids for info in llm.engine_infos] == [[gpus[3], gpus[0]], [gpus[1], gpus[2]]]
        assert lose(llm, 1).gpu_ids == [gpus[1], gpus[2]]
        assert answer(llm) == {" 85"}


def test_workers_on_cpus_reserve_one_each_in_the_given_bundles(make_group):
    group = make_group(*[{"CPU": 2}] * 2)
    places = {"placement_groups": [group], "placement_bundle_indices": [[1, 0]], "device": "cpu", "worker_cls": None}
    with LLM(demo_model_path(), tensor_parallel_size=2, **LIMITS | places) as llm:
        assert answer(llm) == {" 85"}
        free = free_in_group(group.id.hex())
        assert [free[index, "CPU"] for index in range(2)] == [1.0, 1.0]


# ---- where the caller itself runs


def test_vllms_variables_name_bundles_and_the_share_of_the_callers_group(make_group):
    group = make_group(*[{"CPU": 1, "GPU": 1}] * 2)
    _, gpus = train(group, 0.6)
    callers = [
        Caller.options(scheduling_strategy=in_bundle(group, 0)).remote(VARIABLES, tensor_parallel_size=2)
        for _ in range(2)
    ]
    for caller in callers:
        assert ray.get(caller.gpus.remote()) == [[gpus[1], gpus[0]]]
    assert gpus_left(group) == [0, 0]
    assert ray.get(callers[0].lose.remote()) == [gpus[1], gpus[0]]
    assert gpus_left(group) == [0, 0]
    end(callers[0])
    eventually(lambda: gpus_left(group) == [0.2, 0.2])
    ray.kill(callers[1])
    eventually(lambda: gpus_left(group) == [0.4, 0.4])


def test_an_actor_that_captures_its_group_gives_its_engine_the_first_bundles_with_gpus(make_group):
    group = make_group({"CPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1})
    caller = Caller.options(scheduling_strategy=in_bundle(group, 0)).remote({}, tensor_parallel_size=2)
    assert len(ray.get(caller.gpus.remote())[0]) == 2
    assert gpus_left(group) == [0, 0, 0, 1]
    end(caller)
    caller = Caller.options(scheduling_strategy=in_bundle(group, 0)).remote({}, data_parallel_size=4)
    with pytest.raises(ActorDiedError, match=f"{group.id.hex()[:12]}.* has GPUs in 3 of its bundles, but .* 4 workers"):
        ray.get(caller.gpus.remote())


@ray.remote(num_cpus=0)
class AsyncCaller:
    """Has an engine whose start doesn't block the actor's event loop."""

    async def gpus(self, environment: dict[str, str], **options: Any) -> list[list[str]]:
        os.environ.update(environment)
        async with await AsyncLLM.create(demo_model_path(), **LIMITS | options) as llm:
            return [info.gpu_ids for info in llm.engine_infos]


def test_async_actors_give_their_engines_the_same_places(make_group):
    group = make_group(*[{"CPU": 1, "GPU": 1}] * 2)
    _, gpus = train(group, 0.6)
    caller = AsyncCaller.options(num_gpus=0.2, scheduling_strategy=in_bundle(group, 1)).remote()
    assert ray.get(caller.gpus.remote({})) == [[gpus[1]]]
    assert ray.get(caller.gpus.remote(VARIABLES, tensor_parallel_size=2)) == [[gpus[1], gpus[0]]]
    ray.kill(caller)


@pytest.mark.parametrize("environment", [{}, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}])
def test_an_engine_uses_the_gpu_that_its_actor_holds_and_reserves_nothing(make_group, environment: dict[str, str]):
    group = make_group(*[{"CPU": 1, "GPU": 1}] * 2)
    _, gpus = train(group, 0.8)
    where = {"scheduling_strategy": in_bundle(group, 1), "runtime_env": {"env_vars": environment}}
    caller = Caller.options(num_gpus=0.2, **where).remote({})
    assert ray.get(caller.gpus.remote()) == [[gpus[1]]]
    assert ray.get(caller.lose.remote()) == [gpus[1]]
    assert len(live_groups()) == 1
    assert gpus_left(group) == [0.2, 0]
    end(caller)


def test_workers_find_their_gpus_if_ray_does_not_set_the_variable(make_group):
    group = make_group(*[{"CPU": 1, "GPU": 1}] * 2)
    _, gpus = train(group, 0.6)
    runtime_env = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}}
    where = {"scheduling_strategy": in_bundle(group, 0), "runtime_env": runtime_env}
    caller = Caller.options(**where).remote(VARIABLES, tensor_parallel_size=2)
    assert ray.get(caller.gpus.remote()) == [[gpus[1], gpus[0]]]
    end(caller)


def test_an_engine_uses_named_gpus_without_a_reservation(make_group, monkeypatch: pytest.MonkeyPatch):
    group = make_group(*[{"GPU": 1}] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with LLM(demo_model_path(), device_ids=[1, 0], tensor_parallel_size=2, **LIMITS) as llm:
        assert llm.engine_infos[0].gpu_ids == ["3", "2"]
        assert lose(llm, 0).gpu_ids == ["3", "2"]
        assert answer(llm) == {" 85"}
        assert len(live_groups()) == 1
    with LLM(demo_model_path(), device_ids="GPU-12ab", **LIMITS) as llm:
        assert llm.engine_infos[0].gpu_ids == ["GPU-12ab"]
    assert gpus_left(group) == [1] * 4


# ---- errors


@pytest.mark.parametrize(
    ("bundles", "indices", "message"),
    [
        ([{"GPU": 1}] * 2, [[0], [2]], r"has no bundle 2: its bundles are 0 to 1"),
        ([{"GPU": 1}] * 2, [[1], [1]], r"bundle 1 of placement group \w{12} is given to dp_rank 1 and to another one"),
        ([{"GPU": 1}, {"CPU": 1}], [[0], [1]], r"bundle 1 of placement group \w{12} has GPU 0, but .* needs 1"),
        ([{"GPU": 0.5}, {"GPU": 1}], [[1], [0]], r"bundle 0 of placement group \w{12} has GPU 0.5, but .* needs 1"),
    ],
)
def test_bundles_that_can_not_hold_a_worker_are_refused(make_group, bundles: Any, indices: Any, message: str):
    group = make_group(*bundles)
    with pytest.raises(InvalidConfig, match=message):
        LLM(
            demo_model_path(),
            data_parallel_size=2,
            placement_groups=[group] * 2,
            placement_bundle_indices=indices,
            **LIMITS,
        )


def test_a_group_that_is_not_created_in_time_and_a_share_that_is_taken_are_refused(make_group):
    group = make_group({"CPU": 1, "GPU": 1})
    places = LIMITS | {"placement_bundle_indices": [[0]], "placement_timeout_s": 0.5, "gpus_per_worker": 0.5}
    _trainers = train(group, 0.6)
    with pytest.raises(InvalidConfig, match=r"bundle 0 .* has GPU 0\.4 free, but a rank needs 0\.5 of it"):
        LLM(demo_model_path(), placement_groups=[group], **places)
    pending = placement_group([{"GPU": 4}])
    try:
        with pytest.raises(InvalidConfig, match=f"{pending.id.hex()[:12]} is PENDING, not CREATED"):
            LLM(demo_model_path(), placement_groups=[pending], **places)
    finally:
        remove_placement_group(pending)


def test_given_bundles_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidConfig, match=r"placement_bundle_indices='0' .* has no placement group"):
        LLM(demo_model_path(), placement_bundle_indices=[[0]], **LIMITS)
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "0")
    with pytest.raises(InvalidConfig, match=r"VLLM_RAY_BUNDLE_INDICES.* has no placement group"):
        LLM(demo_model_path(), **LIMITS)


def test_an_engine_whose_group_was_removed_says_so(make_group):
    group = make_group(*[{"GPU": 1}] * 2)
    places = {"placement_groups": [group] * 2, "placement_bundle_indices": [[0], [1]]}
    with LLM(demo_model_path(), data_parallel_size=2, **LIMITS, **places) as llm:
        remove_placement_group(group)
        with pytest.raises(EngineDeadError, match=f"placement group {group.id.hex()[:12]} is REMOVED"):
            llm.wait_for_completion_or_failure(LONG_S)
        assert live_groups() == []
