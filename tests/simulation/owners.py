"""Engines that an actor owns, in a simulated cluster: when the actor ends, in whichever way, nothing of them is left.

`python -m simulation.program owners FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

from ray.exceptions import GetTimeoutError, RayActorError

from raycore.cluster.connection import end_before_ray
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.owner import end_with_owner
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.ray_api import actor_class, endpoint, get, kill, on_node
from raycore.system import os, time
from simulation.heard import heard
from simulation.neighbour import Neighbour
from simulation.ranks import FAKE_RANK, Listener, config
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.errors import Unexpected
from simulation.ray.messages import Boundary, Message
from simulation.world.kernel import NEVER, Process


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


def end_raylet(cluster: Cluster, owner: Any, process: Process) -> None:
    """The process may go on. Ray takes it for dead a while later."""
    node: Any = process.machine
    cluster.world.kill(process if node is cluster.head else node.raylet)


FAILS = "it fails in its constructor"
ENDS: dict[str, End | None] = {
    "its process is killed": lambda cluster, owner, process: cluster.world.kill(process),
    "it is killed by Ray": lambda cluster, owner, process: kill(owner),
    "its node crashes": crash,
    "its handle is dropped": None,
    "its driver ends": None,
    FAILS: None,
}
FEW_ENDS: dict[str, End | None] = {"its node's raylet ends": end_raylet}
"""Those of a few owners."""
PLANNED = ("it is killed by Ray", "its handle is dropped", "its driver ends", FAILS)
"""The ends in which nothing breaks: no rank is lost, and nobody has to hear of any."""
_START_S = 200.0
"""Virtual seconds within which callers hear that an owner's constructor has failed. Its start takes up to 30 s."""
_END_S = 30.0
"""Virtual seconds within which the process of an owner ends whose raylet has ended. Before, it ends its ranks, which
takes up to 10 s if some don't react, and removes its groups, for which Ray may take 5 s."""

_DRAIN_S = 500.0
"""Virtual seconds for which a drained node goes on: longer than all that follows."""


NEIGHBOUR = actor_class(Neighbour, num_cpus=0)
"""It has to run on where it is when its node is drained."""


def lose_reaper(cluster: Cluster, process: Process) -> None:
    """Ray starts it again."""
    (reaper,) = [each for each in cluster.gcs.actors.values() if each.class_name == "Reaper" and not each.is_dead]
    first: Any = _running(reaper, None)
    cluster.world.kill(first.process)
    _running(reaper, first)


def _running(actor: Any, before: Any) -> Any:
    """Wait until an actor is up, in another process than `before`. Returns that."""
    while actor.state != "ALIVE" or actor.incarnation is before:
        time.sleep(0.5)
    return actor.incarnation


def lose_reaper_of_drained_node(cluster: Cluster, process: Process) -> Any:
    """Ray starts it again on another node, while its owner goes on. Returns what keeps the owner's node."""
    node: Any = process.machine
    neighbour = NEIGHBOUR.options(scheduling_strategy=on_node(node.id)).remote()
    get(neighbour.is_there.remote())
    node.drain(_DRAIN_S)
    lose_reaper(cluster, process)
    return neighbour


def raise_in_reaper(cluster: Cluster, process: Process) -> None:
    """One of the next answers that the reaper gets raises what nobody expects."""
    left = cluster.world.generator("answers that raise").randint(1, 8)

    def raised_at(boundary: Boundary, message: Message) -> Exception | None:
        nonlocal left
        if boundary is not Boundary.HEARD or message.kind != "request" or message.sender.name != "Reaper":
            return None
        left -= 1
        return Unexpected(f"there is no memory for {message.what}") if not left else None

    cluster.raises = raised_at


BEFORE: dict[str, Callable[[Cluster, Process], Any]] = {
    "its reaper ends": lose_reaper,
    "its reaper ends while its node is drained": lose_reaper_of_drained_node,
}
"""What happens to a few owners before their ends."""
BEFORE_FEWER: dict[str, Callable[[Cluster, Process], Any]] = {"an answer that its reaper gets raises": raise_in_reaper}


class Program:
    """A job in which an owner starts an engine and ends."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._cluster = cluster
        self._num_ranks = num_ranks
        self._draws = cluster.world.generator("the scenario")
        self.how = self._draws.choice(list(ENDS))
        few = cluster.world.generator("what happens to few owners")
        if few.random() < 0.25:
            self.how = few.choice(list(FEW_ENDS))
        self.before = few.choice(list(BEFORE)) if few.random() < 0.4 and self.how != FAILS else ""
        fewer = cluster.world.generator("what happens to fewer owners")
        if fewer.random() < 0.2 and self.how != FAILS:
            self.before = fewer.choice(list(BEFORE_FEWER))
        self._began_s = 0.0
        """When the end began."""
        self._ended_s = NEVER
        """When the owner's process ended."""

    def run(self) -> None:
        api.init()
        owner = OWNER.options(name="owner").remote(self._num_ranks, self.how == FAILS)
        kept = self._hear_of_failure(owner) if self.how == FAILS else self._end(owner)
        if self.how != "its driver ends":
            del owner
            time.sleep(150.0)
            assert not (held := _held(self._cluster)), f"reserved as long as the job runs: {held}"
            assert not (left := _left(self._cluster)), f"left as long as the job runs: {left}"
            if self.how in FEW_ENDS:
                took_s = self._ended_s - self._began_s
                assert took_s < _END_S, f"an owner without a node ended after {took_s:.0f} s"
        del kept

    def _hear_of_failure(self, owner: Any) -> None:
        try:
            get(owner.pid.remote(), timeout_s=_START_S)
        except RayActorError:
            return
        except GetTimeoutError:
            raise AssertionError(f"an owner fails in its constructor, and is asked for {_START_S:g} s") from None
        raise AssertionError("an owner fails in its constructor, and answers")

    def _end(self, owner: Any) -> Any:
        """End the owner when its engine is up. Returns what the program keeps."""
        pid = get(owner.pid.remote())
        process = next(each for each in self._cluster.world.processes if each.pid == pid)
        process.on_end.append(self._note_end)
        kept = (BEFORE | BEFORE_FEWER)[self.before](self._cluster, process) if self.before else None
        time.sleep(self._draws.uniform(0.0, 2.0))
        self._began_s = time.monotonic()
        act = (ENDS | FEW_ENDS)[self.how]
        if act is not None:
            act(self._cluster, owner, process)
        return kept

    def _note_end(self, _: Process) -> None:
        self._ended_s = self._cluster.world.now_s


def main(cluster: Cluster, num_ranks: int) -> None:
    """An owner starts an engine and ends."""
    program = Program(cluster, num_ranks)
    cluster.world.tell(f"{program.before}, then {program.how}" if program.before else program.how)
    with heard() as logged:
        process = cluster.drive("program", program.run)
        while not process.has_ended and not cluster.world.failures:
            time.sleep(1.0)
        time.sleep(60.0)
    if cluster.world.failures:
        raise cluster.world.failures[0][1]
    assert not (left := _left(cluster)), left
    assert not (held := _held(cluster)), held
    assert not (running := [process for process in cluster.actor_processes if not process.has_ended]), running
    if program.how in PLANNED and not program.before:
        assert not logged, [str(each) for each in logged]
        ranks = [actor for actor in cluster.gcs.actors.values() if "_dp" in actor.name]
        assert len(ranks) == num_ranks, f"{len(ranks)} ranks were started for {num_ranks}, though nothing has broken"


def _left(cluster: Cluster) -> list[Any]:
    actors = cluster.gcs.actors.values()
    return [actor for actor in actors if not actor.is_dead and actor.class_name != "Neighbour"]


def _held(cluster: Cluster) -> list[Any]:
    return [group for group in cluster.gcs.groups.values() if group.state != "REMOVED"]
