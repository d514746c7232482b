"""Ranks whose supervisor's calls of Ray raise what nobody expects, and which then are lost, with or without room.

A rank that can't be watched any more is given up. Those that are lost later come back if there is room, wait for it as
long as any rank serves, and otherwise are given up, too. With the last one, the engine fails.

`python -m simulation.program raising FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import random
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.monitor import RankMonitor
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.engine.rank_events import EngineLost, RankEvent
from raycore.ray_api import actor_class, get, kill, node_id, on_node
from raycore.system import time
from simulation.neighbour import Neighbour
from simulation.program import PutIn
from simulation.putting_in import substitute
from simulation.ranks import FAKE_RANK, Listener, config
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.errors import Unexpected
from simulation.ray.faults import check_nothing_left
from simulation.ray.messages import Boundary, Message

_SETTLED_S = 700.0
"""Virtual seconds after which all ranks that are lost have come back, or have been given up. A node counts as lost
after 16 s, and five attempts take 60 s each."""

_NOTICED_S = 30.0
"""Virtual seconds within which the end of a process is noticed that is watched."""


NEIGHBOUR = actor_class(Neighbour, num_cpus=2)


class Busy(Listener):
    """Has requests on all ranks, so that their monitors ask them how they are."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None

    def is_busy(self, dp_rank: int) -> bool:
        return True

    def on_rank_event(self, event: RankEvent) -> None:
        super().on_rank_event(event)
        if isinstance(event, EngineLost):
            self.failure, self.up = event.error, {}


class Raises:
    """What a call raises that a thread of the supervisor's makes, or its answer."""

    def __init__(self, cluster: Cluster, draws: random.Random) -> None:
        self._world = cluster.world
        self._left = draws.choice([1, 2, 3, 5, 10, 20])
        self._at = draws.choice([Boundary.BEFORE, Boundary.HEARD])
        self._calls: set[Message] = set()
        cluster.raises = self._raised_at

    def _raised_at(self, boundary: Boundary, message: Message) -> Exception | None:
        thread = self._world.current
        if boundary is Boundary.BEFORE and thread is not None and thread.name.startswith("raycore-monitor"):
            self._calls.add(message)
        if boundary is not self._at or message not in self._calls:
            return None
        self._left -= 1
        if self._left:
            return None
        self._world.tell(f"{message.what} raises when it is {boundary.value}")
        return Unexpected(f"there is no memory for {message.what}()")


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    draws = cluster.world.generator("the scenario")
    api.init()
    has_room = draws.random() < 0.5
    neighbour = None
    if not has_room:
        neighbour = NEIGHBOUR.options(scheduling_strategy=on_node(node_id())).remote()
        get(neighbour.is_there.remote())
    engine_config = config(num_ranks)
    manager = CoreEngineActorManager(engine_config, runtime=RayRuntime(FAKE_RANK))
    manager.start()
    listener = Busy()
    supervisor = Supervisor(manager, listener, engine_config)
    supervisor.start()
    listener.wait_for(lambda: len(listener.up) == num_ranks, "all ranks are up")
    if draws.random() < 0.8:
        Raises(cluster, draws)
    for node in draws.sample(cluster.nodes[1:], draws.choice([0, 1, 2, 2])):
        time.sleep(draws.choice([0.0, draws.uniform(0.0, 20.0)]))
        node.crash()
    time.sleep(_SETTLED_S)
    cluster.raises = None
    given_up = {dp_rank for dp_rank, view in supervisor.watches().items() if view.has_given_up}
    cluster.world.tell(f"given up: {sorted(given_up)}, up: {sorted(listener.up)}, has ended: {supervisor.has_ended}")
    assert supervisor.has_ended == (not listener.up), f"{sorted(listener.up)} serve, and the rest waits for ever"
    assert not given_up & set(listener.up)
    room = sum(node.total["CPU"] for node in cluster.nodes if node.is_alive) - (0.0 if has_room else 2.0)
    # one that was given up may run on, and have its room
    assert supervisor.has_ended or len(listener.up) + len(given_up) >= min(num_ranks, room), "one has room, and is away"
    for dp_rank, pid in list(listener.up.items()):
        cluster.world.kill(next(each for each in cluster.world.processes if each.pid == pid))
        what = f"dp_rank {dp_rank} serves, and its end is noticed"
        listener.wait_for(lambda each=dp_rank, pid=pid: listener.up.get(each) != pid, what, _NOTICED_S)
    supervisor.stop()
    manager.stop_ranks()
    manager.shutdown()
    supervisor.join(5.0)
    if neighbour is not None:
        kill(neighbour)
    time.sleep(90.0)
    check_nothing_left(cluster)


def _ranks_that_were_given_up_count_as_serving() -> None:
    substitute(Supervisor, "_serving", lambda self: [rank for rank, each in self._monitors.items() if each.is_serving])


def _a_monitor_that_fails_says_nothing() -> None:
    substitute(Supervisor, "_give_up", lambda *_: None)


def _a_monitor_that_fails_ends_in_silence() -> None:
    original = RankMonitor._wait_for_loss

    def wait_for_loss(self: RankMonitor, ends: Any) -> Any:
        try:
            return original(self, ends)
        except MemoryError:
            return None

    substitute(RankMonitor, "_wait_for_loss", wait_for_loss)


FAULTS = [
    PutIn(_ranks_that_were_given_up_count_as_serving, 7, "the rest waits for ever"),
    PutIn(_a_monitor_that_fails_says_nothing, 9, "one has room, and is away"),
    PutIn(_a_monitor_that_fails_ends_in_silence, 0, "its end is noticed"),
]
