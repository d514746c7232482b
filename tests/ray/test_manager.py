"""An engine's ranks come up together, are missed within moments, and leave nothing behind."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from configs import make_config
from ray.util.placement_group import placement_group, placement_group_table

from placement.reserve import release
from raycore.cluster.manager import CoreEngineActorManager, shape_of
from raycore.config import EngineConfig, ExecutorConfig, ParallelConfig
from raycore.errors import EngineDeadError, InitializationError, InvalidConfig, PlacementShortage, WorkerDied
from raycore.messages import EngineInfo

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote(max_restarts=0, concurrency_groups={"run": 1, "io": 1})
class FakeRank:
    """Stands in for `DPEngineCoreActor`; the model's name in its configuration says how it behaves."""

    def __init__(
        self, config_bytes: bytes, dp_rank: int, placement_group: object, num_local_workers: int, engine_id: str
    ) -> None:
        import threading

        self.behaviour = EngineConfig.decode(config_bytes).model.model
        self.dp_rank = dp_rank
        self.num_local_workers = num_local_workers
        self.told = threading.Event()
        if self.behaviour == "fails in its constructor" and dp_rank == 1:
            raise ValueError("no room for weights")

    @ray.method(concurrency_group="run")
    def wait_for_init(self) -> bytes:
        if self.behaviour == "bad config" and self.dp_rank == 1:
            raise InvalidConfig("max_model_len=7 is odd")
        if self.behaviour == "never up" and self.dp_rank == 1:
            time.sleep(60)
        if self.behaviour == "dies in init" and self.dp_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return msgspec.msgpack.encode(
            EngineInfo(
                dp_rank=self.dp_rank,
                pid=os.getpid(),
                node_id=ray.get_runtime_context().get_node_id(),
                num_blocks=8,
                block_size=16,
                max_model_len=64,
                dtype="float32",
                timings_s={"num_local_workers": self.num_local_workers},
                worker_pids=[],
            )
        )

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        if self.behaviour == "worker dies" and self.dp_rank == 1:
            raise WorkerDied(0, 4711, "n1", "out of memory")
        if self.behaviour == "returns" and self.dp_rank == 1:
            return
        self.told.wait(3600 if self.behaviour == "deaf" else None)

    @ray.method(concurrency_group="io")
    def stop(self) -> None:
        if self.behaviour != "deaf":
            self.told.set()


def config(behaviour: str = "", *, data_parallel_size: int = 2, executor: ExecutorConfig | None = None) -> EngineConfig:
    base = make_config()
    return msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, model=behaviour),
        parallel=ParallelConfig(1, data_parallel_size),
        executor=executor or ExecutorConfig("inline", init_timeout_s=30.0, shutdown_timeout_s=5.0),
    )


def manager_of(engine_config: EngineConfig, **options: Any) -> CoreEngineActorManager:
    return CoreEngineActorManager(engine_config, actor_cls=FakeRank, **options)


def live_groups() -> list[dict[str, Any]]:
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def is_running(pid: int) -> bool:
    """Whether the process exists and isn't a zombie that Ray has yet to bury."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def ignore(dp_rank: int, error: EngineDeadError) -> None:
    """A caller that doesn't care."""


@pytest.fixture
def failures() -> queue.Queue[tuple[int, EngineDeadError]]:
    return queue.Queue()


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    yield
    assert live_groups() == []
    assert ray.is_initialized(), "the test's own Ray isn't the manager's to stop"


def test_all_ranks_come_up_in_rank_order():
    manager = manager_of(config())
    infos = manager.start(ignore)
    assert [info.dp_rank for info in infos] == [0, 1]
    assert [info.timings_s["num_local_workers"] for info in infos] == [2, 2]
    assert {group["name"] for group in live_groups()} == {f"raycore_{manager.engine_id}_dp{rank}" for rank in range(2)}
    manager.shutdown()
    assert not any(is_running(info.pid) for info in infos)
    manager.shutdown()


def test_the_shape_of_an_engine_with_worker_actors():
    shape = shape_of(config(executor=ExecutorConfig("ray")))
    assert (shape.num_cpus, shape.engine_bundle_index) == (4, 1)


def test_a_killed_rank_is_reported_at_once(failures: queue.Queue[tuple[int, EngineDeadError]]):
    manager = manager_of(config())
    infos = manager.start(lambda rank, error: failures.put((rank, error)))
    os.kill(infos[1].pid, signal.SIGKILL)
    rank, error = failures.get(timeout=1.0)
    assert rank == 1
    assert str(error).startswith(f"dp_rank 1 (pid {infos[1].pid}, node {infos[1].node_id[:8]}) died: SYSTEM_ERROR")
    manager.shutdown()
    assert failures.empty(), "the other rank was asked to stop"


@pytest.mark.parametrize(
    ("behaviour", "begins"),
    [("worker dies", "worker 0 (pid 4711, node n1) died: out of memory\n"), ("returns", "dp_rank 1 (pid ")],
)
def test_a_run_that_ends_unasked_is_reported(
    behaviour: str, begins: str, failures: queue.Queue[tuple[int, EngineDeadError]]
):
    manager = manager_of(config(behaviour))
    manager.start(lambda rank, error: failures.put((rank, error)))
    rank, error = failures.get(timeout=5.0)
    assert rank == 1
    assert str(error).startswith(begins)
    manager.shutdown()


@pytest.mark.parametrize(
    ("behaviour", "kind", "begins"),
    [
        ("fails in its constructor", InitializationError, "ValueError: no room for weights\n"),
        ("bad config", InvalidConfig, "max_model_len=7 is odd"),
        ("dies in init", InitializationError, "SYSTEM_ERROR"),
    ],
)
def test_the_first_rank_that_fails_to_start_says_why(behaviour: str, kind: type[Exception], begins: str):
    manager = manager_of(config(behaviour))
    with pytest.raises(kind) as caught:
        manager.start(ignore)
    assert str(caught.value).startswith(begins)
    manager.shutdown()


def test_a_rank_that_never_comes_up_is_given_up():
    executor = ExecutorConfig("inline", init_timeout_s=2.0)
    with pytest.raises(InitializationError, match=r"dp_ranks \[.*1\] are not up after init_timeout_s=2"):
        manager_of(config("never up", executor=executor)).start(ignore)


def test_a_rank_that_does_not_stop_is_killed():
    manager = manager_of(config("deaf", executor=ExecutorConfig("inline", shutdown_timeout_s=0.3)))
    infos = manager.start(ignore)
    manager.shutdown()
    assert not any(is_running(info.pid) for info in infos)


def test_a_shape_too_large_for_the_cluster_is_refused_at_once():
    with pytest.raises(PlacementShortage, match="17 ranks of 1 worker"):
        manager_of(config(data_parallel_size=17)).start(ignore)


def test_the_callers_groups_are_used_and_left():
    groups = [placement_group([{"CPU": 1}, {"CPU": 1}]) for _ in range(2)]
    manager = manager_of(config(), placement_groups=groups)
    manager.start(ignore)
    assert len(live_groups()) == 2
    manager.shutdown()
    assert len(live_groups()) == 2
    release(groups)


def test_the_callers_groups_must_be_one_a_rank_and_large_enough():
    group = placement_group([{"CPU": 0.5}])
    with pytest.raises(InvalidConfig, match="1 placement_groups for data_parallel_size=2"):
        manager_of(config(), placement_groups=[group]).start(ignore)
    with pytest.raises(InvalidConfig, match=r"placement_groups: bundle 0 .* needs 1"):
        manager_of(config(data_parallel_size=1), placement_groups=[group]).start(ignore)
    release([group])


def test_shutdown_before_start_is_nothing():
    manager_of(config()).shutdown()
