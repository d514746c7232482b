"""Ranks without an engine, for the tests of those who start and watch them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, Literal

import msgspec
import ray
from configs import make_config
from ray.util.placement_group import placement_group_table

from raycore.activity import Activity
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.runtime import RayRuntime
from raycore.config import DType, EngineConfig, ExecutorConfig, ParallelConfig, RecoveryConfig
from raycore.errors import InvalidConfig, WorkerDied
from raycore.messages import EngineInfo
from raycore.worker.rank import RankIdentity


@ray.remote(max_restarts=0, concurrency_groups={"run": 1, "io": 1})
class FakeRank:
    """Stands in for `DPEngineCoreActor`; the model's name in its configuration says how it behaves."""

    def __init__(self, config_bytes: bytes, identity: RankIdentity, bundles: object, name: str) -> None:
        model = EngineConfig.decode(config_bytes).model
        self.behaviour, self.dtype = model.model, model.dtype
        dp_rank = self.dp_rank = identity.dp_rank
        self.is_first = name.endswith(f"_dp{dp_rank}")
        """Whether it took nobody's place."""
        self.num_local_workers = identity.num_local_workers
        self.told = threading.Event()
        if self.behaviour == "fails in its constructor" and dp_rank == 1:
            raise ValueError("no room for weights")

    @ray.method(concurrency_group="run")
    def choose_dtype(self) -> str:
        return "bfloat16" if self.dp_rank == 0 and self.is_first else "float32"

    @ray.method(concurrency_group="run")
    def wait_for_init(self, rendezvous: str | None, dtype: str | None, num_blocks: int | None) -> bytes:
        if self.behaviour == "bad config" and self.dp_rank == 1:
            raise InvalidConfig("max_model_len=7 is odd")
        if self.behaviour == "never up" and self.dp_rank == 1:
            time.sleep(60)
        if self.behaviour == "dies in init" and self.dp_rank == 1:
            print("no room for weights", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"dp_rank {self.dp_rank} is ready", file=sys.stderr)  # here: a test may end it before `run` has begun
        return msgspec.msgpack.encode(
            EngineInfo(
                dp_rank=self.dp_rank,
                pid=os.getpid(),
                node_id=ray.get_runtime_context().get_node_id(),
                num_blocks=8,
                block_size=16,
                max_model_len=64,
                dtype=dtype or self.dtype,
                timings_s={"num_local_workers": self.num_local_workers},
                worker_pids=[],
            )
        )

    @ray.method(concurrency_group="run")
    def run(self, peers: list[object], activity: Activity) -> None:
        if self.behaviour == "worker dies" and self.dp_rank == 1 and self.is_first:
            raise WorkerDied(0, 4711, "n1", "out of memory")
        self.told.wait(3600 if self.behaviour == "deaf" else None)

    @ray.method(concurrency_group="io")
    def step_age_s(self) -> float:
        return 0.0

    @ray.method(concurrency_group="io")
    def stop(self) -> None:
        if self.behaviour != "deaf":
            self.told.set()


def config(
    behaviour: str = "",
    *,
    dtype: Literal["auto"] | DType = "float32",
    data_parallel_size: int = 2,
    executor: ExecutorConfig | None = None,
    wait_for_nodes_s: float = 0.0,
    placement_timeout_s: float = 60.0,
) -> EngineConfig:
    base = make_config()
    return msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, model=behaviour, dtype=dtype),
        parallel=ParallelConfig(1, data_parallel_size, wait_for_nodes_s=wait_for_nodes_s),
        recovery=RecoveryConfig(standby_delay_s=None, placement_timeout_s=placement_timeout_s),
        executor=executor or ExecutorConfig("inline", init_timeout_s=30.0, shutdown_timeout_s=5.0),
    )


def manager_of(engine_config: EngineConfig, **options: Any) -> CoreEngineActorManager:
    return CoreEngineActorManager(engine_config, runtime=RayRuntime(FakeRank), **options)


def live_groups() -> list[dict[str, Any]]:
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def free_resources() -> dict[str, float]:
    """What of the cluster is free, once what was reserved before has come back.

    That may be less than all: Ray's own count has lacked a CPU that no actor, placement group or lease held.
    """
    deadline_s = time.monotonic() + 2.0
    while True:
        free, total = ray.available_resources(), ray.cluster_resources()
        if time.monotonic() > deadline_s or (not live_groups() and has_free(free, total)):
            return free
        time.sleep(0.05)


def has_free(free: dict[str, float], wanted: dict[str, float]) -> bool:
    """Whether as many CPUs and GPUs are free as are wanted."""
    return all(free.get(name, 0.0) >= wanted.get(name, 0.0) for name in ("CPU", "GPU"))
