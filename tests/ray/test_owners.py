"""Engines made in actors and tasks: whatever ends the owner, what it reserved is free again while the job lives on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import ray
from fake_ranks import config, free_resources, has_free, live_groups, manager_of
from job_cluster import eventually
from ray.util import ActorPool
from ray.util.placement_group import placement_group, remove_placement_group
from waiting import LONG_S

from raycore import LLM, SamplingParams
from raycore.cluster.logs import read_log
from raycore.cluster.manager import CoreEngineActorManager
from raycore.demo import demo_model_path
from raycore.node.processes import is_running
from raycore.ray_api import logs_dir

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]

LIMITS = {"num_threads": 1, "dtype": "float32", "max_model_len": 256, "use_tqdm_on_load": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8)

kept: list[LLM] = []
"""What a task leaves behind in its process."""


@pytest.fixture(autouse=True)
def is_all_free(ray_cluster):
    """Whether no placement group and no actor is there, and nothing is taken. So it is in the end."""
    before = free_resources()

    def is_free() -> bool:
        return not live_groups() and not live_actors() and has_free(ray.available_resources(), before)

    yield is_free
    eventually(is_free, describe)


def describe() -> str:
    return f"groups {live_groups()}, actors {live_actors()}, free {ray.available_resources()}"


def live_actors(class_name: str = "") -> list[dict[str, Any]]:
    from ray._private.state import actors

    return [actor for actor in actors().values() if actor["State"] != "DEAD" and class_name in actor["ActorClassName"]]


@ray.remote(num_cpus=0, max_concurrency=2)
class FakeOwner:
    """Starts ranks that compute nothing."""

    def __init__(self) -> None:
        self.manager: CoreEngineActorManager | None = None

    def start(self, data_parallel_size: int = 2, wait_for_nodes_s: float = 0.0) -> int:
        self.manager = manager_of(config(data_parallel_size=data_parallel_size, wait_for_nodes_s=wait_for_nodes_s))
        self.manager.start()
        return os.getpid()

    def shut_down(self) -> None:
        assert self.manager is not None
        self.manager.shutdown()

    def pid(self) -> int:
        return os.getpid()

    def crash(self) -> None:
        os._exit(1)


@ray.remote(num_cpus=0)
class Owner:
    """Has an engine, as the actors of a rollout or of `map_batches` do."""

    def __init__(self, **options: Any) -> None:
        self.llm = LLM(demo_model_path(), **LIMITS, **options)

    def __call__(self, prompts: list[str]) -> list[str]:
        return answers(self.llm, prompts)

    def use_another(self) -> None:
        """Ends with an error that the engine is a local variable of."""
        llm = LLM(demo_model_path(), **LIMITS)
        raise ValueError(answers(llm, ["27 + 58 ="])[0])


@ray.remote(num_cpus=0)
class FailingOwner:
    """Its `__init__` creates an engine, then raises."""

    def __init__(self) -> None:
        self.llm = LLM(demo_model_path(), **LIMITS)
        raise ValueError(answers(self.llm, ["27 + 58 ="])[0])

    def ready(self) -> None:
        pass


def answers(llm: LLM, prompts: list[str]) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def kill(owner: Any, pid: int) -> None:
    ray.kill(owner)


def kill_and_restart(owner: Any, pid: int) -> None:
    ray.kill(owner, no_restart=False)
    eventually(lambda: ray.get(owner.pid.remote()) != pid and not live_groups(), describe)
    ray.kill(owner)


def crash(owner: Any, pid: int) -> None:
    owner.crash.remote()


def send_sigkill(owner: Any, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def lose(owner: Any, pid: int) -> None:
    """The caller's reference is the last."""


@pytest.mark.parametrize("end", [kill, kill_and_restart, crash, send_sigkill, lose])
def test_placement_groups_are_removed_when_the_owning_actor_ends(end: Callable[[Any, int], None]):
    again = {"max_restarts": 1, "max_task_retries": 10} if end is kill_and_restart else {}
    owner = FakeOwner.options(**again).remote()
    pid = ray.get(owner.start.remote())
    assert len(live_groups()) == 2
    end(owner, pid)


def test_ranks_that_end_with_their_actor_are_not_called_dead():
    owner = Owner.remote(device="cpu")
    pid = ray.get(owner.__ray_call__.remote(lambda self: os.getpid()))
    del owner
    eventually(lambda: not is_running(pid), describe)
    assert read_log(logs_dir(), pid) == []


def test_an_engine_ends_with_an_actor_whose_constructor_fails():
    owner = FailingOwner.remote()
    with pytest.raises(ray.exceptions.RayActorError, match="ValueError:  85"):
        ray.get(owner.ready.remote(), timeout=60)


def test_pending_placement_groups_are_removed_when_the_owning_actor_ends():
    owner = FakeOwner.remote()
    owner.start.remote(17, wait_for_nodes_s=100.0)
    eventually(lambda: {group["state"] for group in live_groups()} == {"CREATED", "PENDING"}, describe)
    ray.kill(owner)


def test_an_engine_shut_down_in_a_living_actor_leaves_no_reaper_and_no_group():
    owner = FakeOwner.remote()
    ray.get(owner.start.remote())
    ray.get(owner.shut_down.remote())
    eventually(lambda: len(live_actors()) == 1 and not live_groups(), describe)


def test_groups_are_removed_with_their_owner_even_if_the_reaper_was_killed_before():
    owner = FakeOwner.remote()
    pid = ray.get(owner.start.remote())
    (reaper,) = eventually(lambda: [actor for actor in live_actors("Reaper") if actor["Pid"]])
    os.kill(reaper["Pid"], signal.SIGKILL)
    eventually(lambda: not is_running(reaper["Pid"]))
    os.kill(pid, signal.SIGKILL)


def test_a_driver_starts_no_reaper():
    manager = manager_of(config())
    manager.start()
    assert live_actors("Reaper") == []
    manager.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def use_an_engine(keeps_it: bool, fails: bool) -> list[str]:
    llm = LLM(demo_model_path(), standby_delay_s=None, **LIMITS)
    if keeps_it:
        kept.append(llm)
    if fails:
        raise ValueError("the rest of the task fails")
    return answers(llm, ["27 + 58 ="])


@pytest.mark.parametrize("keeps_it", [False, True])
def test_an_engine_ends_with_the_task_that_made_it(keeps_it: bool, is_all_free):
    assert ray.get(use_an_engine.remote(keeps_it, fails=False)) == [" 85"]
    eventually(is_all_free, describe)
    with pytest.raises(ValueError, match="the rest of the task fails"):
        ray.get(use_an_engine.remote(keeps_it, fails=True))


def test_the_engine_of_one_actor_serves_on_when_another_owner_dies():
    owners = [Owner.remote(standby_delay_s=0.0) for _ in range(2)]
    assert ray.get([owner.__call__.remote(["27 + 58 ="]) for owner in owners]) == [[" 85"]] * 2
    groups = live_groups()
    assert len(groups) == 2
    ray.kill(owners.pop())
    eventually(lambda: len(live_groups()) == 1, describe)
    assert ray.get(owners[0].__call__.remote(["27 + 58 ="])) == [" 85"]
    with pytest.raises(ValueError, match=" 85"):
        ray.get(owners[0].use_another.remote())
    eventually(lambda: len(live_groups()) == 1, describe)
    assert ray.get(owners[0].__call__.remote(["27 + 58 ="])) == [" 85"]


@pytest.fixture
def two_cpus():
    """What is left of the cluster: too little for more than two ranks."""
    rest = placement_group([{"CPU": ray.available_resources()["CPU"] - 2}])
    assert rest.wait(LONG_S)
    yield
    remove_placement_group(rest)


@pytest.mark.usefixtures("two_cpus")
def test_an_engine_has_room_at_once_after_a_pool_of_actors_with_engines():
    """As `ray.data`'s `map_batches` runs a class: actors for the length of a run, then the next run."""

    def run() -> list[list[str]]:
        pool = ActorPool([Owner.remote(standby_delay_s=None) for _ in range(2)])
        return list(pool.map(lambda owner, batch: owner.__call__.remote(batch), [["27 + 58 ="] * 2] * 4))

    for _ in range(2):
        assert run() == [[" 85"] * 2] * 4
    with LLM(demo_model_path(), data_parallel_size=2, standby_delay_s=None, **LIMITS) as llm:
        assert answers(llm, ["27 + 58 ="]) == [" 85"]
