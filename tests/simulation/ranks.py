"""Ranks without an engine in a simulated cluster: raycore's own control plane starts, replaces and ends them.

`python -m simulation.program ranks FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simulation.installed  # noqa: F401

# isort: split

import msgspec
from configs import make_config

from raycore.activity import Activity
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig, ExecutorConfig, ParallelConfig, RecoveryConfig
from raycore.engine.rank_events import LossExplained, RankEvent, RanksLost, RankUp
from raycore.messages import EngineInfo
from raycore.node import lifeline
from raycore.ray_api import actor_class, end_with_raylet, endpoint, node_id
from raycore.system import os, threading, time
from raycore.worker.rank import RankIdentity
from simulation.cluster.accounts.losses import problems
from simulation.cluster.judges import outlived
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.faults import FAULTS, check_nothing_left
from simulation.world.threads import world


class FakeRank:
    """Stands in for `DPEngineCoreActor`."""

    def __init__(self, config_bytes: bytes, identity: RankIdentity, bundles: object, name: str) -> None:
        self.dp_rank = identity.dp_rank
        self.told = threading.Event()
        end_with_raylet()
        lifeline.lock()

    @endpoint("run")
    def wait_for_init(self, rendezvous: str | None, dtype: str | None, num_blocks: int | None) -> bytes:
        return msgspec.msgpack.encode(
            EngineInfo(
                dp_rank=self.dp_rank,
                pid=os.getpid(),
                node_id=node_id(),
                num_blocks=8,
                block_size=16,
                max_model_len=64,
                dtype=dtype or "float32",
                timings_s={},
                worker_pids=[],
            )
        )

    @endpoint()
    def load_progress(self) -> float:
        return 0.5

    @endpoint("run")
    def run(self, peers: list[object], activity: Activity) -> None:
        self.told.wait()

    @endpoint("io")
    def step_age_s(self) -> float:
        return 0.0

    @endpoint("io")
    def stop(self) -> None:
        self.told.set()


FAKE_RANK = actor_class(FakeRank, concurrency_groups={"run": 1, "io": 1})


class Listener:
    """Hears what becomes of ranks."""

    def __init__(self) -> None:
        self.up: dict[int, int] = {}
        """The pid of each rank that is up."""
        self.events: list[str] = []
        self.explanations: list[str] = []
        """What is wrong with those that there were."""
        self.changed = threading.Condition()

    def on_rank_event(self, event: RankEvent) -> None:
        with self.changed:
            self.events.append(type(event).__name__)
            if isinstance(event, RankUp):
                self.up[event.dp_rank] = event.info.pid
            elif isinstance(event, RanksLost):
                for dp_rank in event.dp_ranks:
                    self.up.pop(dp_rank, None)
            elif isinstance(event, LossExplained):
                self.explanations += problems(event.error, world().systems["ray"])
            self.changed.notify_all()

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        pass

    def is_busy(self, dp_rank: int) -> bool:
        return False

    def wait_for(self, is_so: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        with self.changed:
            assert self.changed.wait_for(is_so, timeout_s), f"not within {timeout_s:g} s: {what}; heard {self.events}"


def config(num_ranks: int) -> EngineConfig:
    return msgspec.structs.replace(
        make_config(),
        parallel=ParallelConfig(1, num_ranks),
        recovery=RecoveryConfig(standby_delay_s=None, placement_timeout_s=60.0),
        executor=ExecutorConfig("inline", init_timeout_s=300.0, shutdown_timeout_s=5.0),
    )


def main(cluster: Cluster, num_ranks: int) -> list[str]:
    """An engine starts, something breaks, what was lost is replaced, and it ends. Nothing of it is left.

    Returns the events.
    """
    draws = cluster.world.generator("the scenario")
    api.init()
    engine_config = config(num_ranks)
    manager = CoreEngineActorManager(engine_config, runtime=RayRuntime(FAKE_RANK))
    infos, listener = manager.start(), Listener()
    supervisor = Supervisor(manager, listener, engine_config)
    supervisor.start()
    listener.wait_for(lambda: len(listener.up) == num_ranks, "all ranks are up")
    time.sleep(draws.uniform(0.0, 3.0))
    victim = infos[draws.randrange(num_ranks)]
    process = next(each for each in cluster.world.processes if each.pid == victim.pid)
    fault = draws.choice(list(FAULTS))
    cluster.world.tell(f"{fault}: dp_rank {victim.dp_rank}")
    FAULTS[fault](cluster, process, draws)
    if process.has_ended or fault == "its node is drained":
        listener.wait_for(lambda: listener.up.get(victim.dp_rank, victim.pid) != victim.pid, "the rank is replaced")
    listener.wait_for(lambda: len(listener.up) == num_ranks, "all ranks are up again")
    assert not supervisor.has_ended
    cluster.on_boundary = None
    supervisor.stop()
    manager.stop_ranks()
    manager.shutdown()
    supervisor.join(5.0)
    time.sleep(90.0)  # longer than the control store may be away
    check_nothing_left(cluster)
    assert not listener.explanations, listener.explanations
    if fault != "it is killed while the control store is away":
        assert not (old := [*outlived(cluster)]), old
    return listener.events
