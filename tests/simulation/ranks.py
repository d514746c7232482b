"""Ranks without an engine in a simulated cluster: raycore's own control plane starts, replaces and ends them.

Run as a program, because the simulated Ray has to be in its place before anything of raycore is imported:
`python -m simulation.ranks FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import logging
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from simulation.ray import host, modules
from simulation.world import system

system.install()
modules.install()
host.install()

import msgspec  # noqa: E402
from configs import make_config  # noqa: E402

from raycore.activity import Activity  # noqa: E402
from raycore.cluster.manager import CoreEngineActorManager  # noqa: E402
from raycore.cluster.runtime import RayRuntime  # noqa: E402
from raycore.cluster.supervisor import Supervisor  # noqa: E402
from raycore.config import EngineConfig, ExecutorConfig, ParallelConfig, RecoveryConfig  # noqa: E402
from raycore.engine.rank_events import RankEvent, RanksLost, RankUp  # noqa: E402
from raycore.messages import EngineInfo  # noqa: E402
from raycore.node import lifeline  # noqa: E402
from raycore.ray_api import actor_class, end_with_raylet, endpoint, node_id  # noqa: E402
from raycore.system import os, threading, time  # noqa: E402
from raycore.worker.rank import RankIdentity  # noqa: E402
from simulation.ray import api  # noqa: E402
from simulation.ray.cluster import Cluster  # noqa: E402
from simulation.ray.messages import Boundary, Message  # noqa: E402
from simulation.world.kernel import Process, World  # noqa: E402
from simulation.world.own_state import OwnState  # noqa: E402


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
        self.changed = threading.Condition()

    def on_rank_event(self, event: RankEvent) -> None:
        with self.changed:
            self.events.append(type(event).__name__)
            if isinstance(event, RankUp):
                self.up[event.dp_rank] = event.info.pid
            elif isinstance(event, RanksLost):
                for dp_rank in event.dp_ranks:
                    self.up.pop(dp_rank, None)
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
    supervisor.stop()
    manager.stop_ranks()
    manager.shutdown()
    supervisor.join(5.0)
    check_nothing_left(cluster)
    return listener.events


Fault = Callable[[Cluster, Process, random.Random], object]


def kill(cluster: Cluster, process: Process, draws: random.Random) -> None:
    cluster.world.kill(process)


def kill_for_memory(cluster: Cluster, process: Process, draws: random.Random) -> None:
    cluster.kill_for_memory(process)


def kill_without_control_store(cluster: Cluster, process: Process, draws: random.Random) -> None:
    begin = draws.choice([cluster.gcs.stall, cluster.gcs.restart])
    begin(draws.uniform(0.1, 50.0))
    time.sleep(draws.uniform(0.0, 1.0))
    cluster.world.kill(process)


def lose_node(cluster: Cluster, process: Process, draws: random.Random) -> None:
    node: Any = process.machine
    if node is cluster.head:
        cluster.world.kill(process)
    else:
        node.crash()


def lose_raylet(cluster: Cluster, process: Process, draws: random.Random) -> None:
    node: Any = process.machine
    cluster.world.kill(process if node is cluster.head else node.raylet)


def drain_node(cluster: Cluster, process: Process, draws: random.Random) -> None:
    node: Any = process.machine
    if node is cluster.head:
        cluster.world.kill(process)
    else:
        node.drain(draws.uniform(0.5, 60.0))


def remove_group(cluster: Cluster, process: Process, draws: random.Random) -> None:
    actor = next(each for each in cluster.gcs.actors.values() if each.name == process.name)
    cluster.gcs.remove_group(actor.strategy.placement_group.id.hex())


def kill_successor(cluster: Cluster, process: Process, draws: random.Random) -> None:
    """Kill a rank, and a process that comes after it, at a boundary of one of its messages."""
    boundary = draws.choice([Boundary.RECEIVED, Boundary.ANSWERED, Boundary.HEARD])
    method = draws.choice(["wait_for_init", "run", "step_age_s", "load_progress"])

    def strike(at: Boundary, message: Message) -> None:
        if at is boundary and message.what == method and message.receiver is not None:
            cluster.on_boundary = None
            cluster.world.tell(f"is killed when {method} is {boundary.value}", message.receiver)
            cluster.world.kill(message.receiver)

    cluster.on_boundary = strike
    cluster.world.kill(process)


FAULTS: dict[str, Fault] = {
    "its process is killed": kill,
    "its process has no memory": kill_for_memory,
    "it is killed while the control store is away": kill_without_control_store,
    "its node crashes": lose_node,
    "its node's raylet ends": lose_raylet,
    "its node is drained": drain_node,
    "its group is removed": remove_group,
    "it is killed, and another one at a message": kill_successor,
}


def check_nothing_left(cluster: Cluster) -> None:
    time.sleep(30.0)
    assert not (left := [actor for actor in cluster.gcs.actors.values() if not actor.is_dead]), left
    assert not (held := [group for group in cluster.gcs.groups.values() if group.state != "REMOVED"]), held
    driver = cluster.gcs.process if cluster.world.current is None else cluster.world.current.process
    others = [process for process in cluster.world.processes if process.name.startswith("raycore")]
    assert not (running := [process for process in others if not process.has_ended]), running
    threads = [thread.name for thread in driver.threads if not thread.is_over]
    assert threads == ["main", "ray-io"], threads
    used = {node.name: node.free["CPU"] for node in cluster.nodes if node.is_alive and node.free["CPU"] != 2.0}
    assert not used, used


def run(seed: int, *, tells: bool = False) -> World:
    world = World(seed, last_s=2000.0)
    cluster = Cluster(world)
    for _ in range(3):
        cluster.add_node(CPU=2)
    OwnState(world)
    try:
        world.run(lambda: main(cluster, num_ranks=1 + seed % 4))
        assert not world.failures, world.failures
    except BaseException:
        for at_s, who, what in world.story if tells else []:
            print(f"  {at_s:10.4f} {who}: {what}")
        raise
    return world


if __name__ == "__main__":
    logging.getLogger("raycore").setLevel(logging.CRITICAL)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            print(seed, run(seed, tells=count == 1).digest, flush=True)
        except BaseException as error:
            print(seed, "failed:", "".join(traceback.format_exception(error)), flush=True)
