"""Engines that an actor owns, in a simulated cluster: when the actor ends, in whichever way, nothing of them is left.

`python -m simulation.program owners FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

from raycore.cluster.connection import end_before_ray
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.owner import end_with_owner
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.ray_api import actor_class, endpoint, get, kill
from raycore.system import os, time
from simulation.ranks import FAKE_RANK, Listener, config
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.world.kernel import Process


class Engine:
    """A manager and a supervisor that end with their owner, as `RunningEngine` does."""

    def __init__(self, num_ranks: int) -> None:
        engine_config = config(num_ranks)
        manager = CoreEngineActorManager(engine_config, runtime=RayRuntime(FAKE_RANK))
        listener = Listener()
        supervisor = Supervisor(manager, listener, engine_config)
        self._finalizer = weakref.finalize(self, _stop, supervisor, manager)
        self._finalizer.atexit = False  # the real program's exit is no simulated process's
        self.infos = manager.start()
        end_before_ray(self._finalizer)
        end_with_owner(self._finalizer)
        supervisor.start()
        listener.wait_for(lambda: len(listener.up) == num_ranks, "all ranks are up")


def _stop(supervisor: Supervisor, manager: CoreEngineActorManager) -> None:
    supervisor.stop()
    manager.stop_ranks()
    manager.shutdown()
    supervisor.join(2.0)


class Owner:
    """An actor that has an engine."""

    def __init__(self, num_ranks: int, fails: bool) -> None:
        self.engine = Engine(num_ranks)
        if fails:
            raise ValueError("the owner's constructor has failed")

    @endpoint()
    def pid(self) -> int:
        return os.getpid()


OWNER = actor_class(Owner, num_cpus=0)

End = Callable[[Cluster, Any, Process], object]


def crash(cluster: Cluster, owner: Any, process: Process) -> None:
    node: Any = process.machine
    if node is cluster.head:
        cluster.world.kill(process)
    else:
        node.crash()


ENDS: dict[str, End | None] = {
    "its process is killed": lambda cluster, owner, process: cluster.world.kill(process),
    "it is killed by Ray": lambda cluster, owner, process: kill(owner),
    "its node crashes": crash,
    "its handle is dropped": None,
    "its driver ends": None,
    "it fails in its constructor": None,
}


def main(cluster: Cluster, num_ranks: int) -> None:
    """An owner starts an engine and ends."""
    draws = cluster.world.generator("the scenario")
    how = draws.choice(list(ENDS))
    cluster.world.tell(how)
    begun: list[Process] = []

    def program() -> None:
        api.init()
        owner = OWNER.options(name="owner").remote(num_ranks, how == "it fails in its constructor")
        if how != "it fails in its constructor":
            pid = get(owner.pid.remote())
            begun.append(next(each for each in cluster.world.processes if each.pid == pid))
            time.sleep(draws.uniform(0.0, 2.0))
            act = ENDS[how]
            if act is not None:
                act(cluster, owner, begun[0])
        if how != "its driver ends":
            del owner
            time.sleep(150.0)
            assert not (held := _held(cluster)), f"reserved as long as the job runs: {held}"

    process = cluster.drive("program", program)
    while not process.has_ended and not cluster.world.failures:
        time.sleep(1.0)
    time.sleep(60.0)
    assert not (left := [actor for actor in cluster.gcs.actors.values() if not actor.is_dead]), left
    assert not (held := _held(cluster)), held
    assert not (running := [process for process in cluster.actor_processes if not process.has_ended]), running


def _held(cluster: Cluster) -> list[Any]:
    return [group for group in cluster.gcs.groups.values() if group.state != "REMOVED"]
