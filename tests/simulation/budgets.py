"""Ranks that are lost again and again, whose starts fail, or for which there is no room: how often each is started
again, after which pauses, and when it is given up. What Ray is asked for is compared with what the options promise.

`python -m simulation.program budgets FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import simulation.installed  # noqa: F401

# isort: split

import msgspec

from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.reservations import Reservations
from raycore.cluster.restart_budget import RestartBudget
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.config import RecoveryConfig
from raycore.engine.rank_events import EngineLost, RankEvent, RanksLost
from raycore.ray_api import actor_class, endpoint, get, kill, on_node
from raycore.system import time
from simulation.neighbour import NEIGHBOUR
from simulation.program import PutIn
from simulation.putting_in import substitute
from simulation.ranks import FakeRank, Listener, config
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.faults import check_nothing_left
from simulation.ray.nodes import Node
from simulation.world.threads import world

_SLACK_S = 6.0
"""Virtual seconds that an attempt may take besides its pause: Ray notices a failure after up to 2 s, takes as long to
tell of it, and answers questions of the placement in between."""
_UP_S = 40.0
"""The longest that a rank is up before it is lost again. Attempts count as a crash loop for 10 s, 30 s or longer."""
_START_S = 40.0
"""Within so many, an attempt has started a rank, or has failed."""
_NOTICED_S = 30.0
"""Within so many, it is known that a node has crashed."""
_BACK_S = 60.0
"""Within so many, ranks are up for which there is room again."""
_SHOWN_S = 1.5
"""After so many, all see what is used of a node."""
_ABOUT_S = 0.01


class Trouble(NamedTuple):
    """Why a rank has to be started again."""

    at_s: float
    is_loss: bool
    """Whether it has been up. Otherwise its start has failed."""


class Frail(FakeRank):
    """A rank whose start fails as often as the scenario says."""

    @endpoint("run")
    def wait_for_init(self, rendezvous: str | None, dtype: str | None, num_blocks: int | None) -> bytes:
        here = world()
        failures: dict[int, int] = here.systems.setdefault("failures of starts", {})
        if failures.get(self.dp_rank, 0):
            failures[self.dp_rank] -= 1
            here.systems["troubles"].append(Trouble(here.now_s, is_loss=False))
            raise ValueError("this start fails")
        return super().wait_for_init(rendezvous, dtype, num_blocks)


FRAIL = actor_class(Frail, concurrency_groups={"run": 1, "io": 1})


class Losses(Listener):
    """Notes when a rank is lost, and when the engine is."""

    def __init__(self, victim: int, troubles: list[Trouble]) -> None:
        super().__init__()
        self._victim = victim
        self._troubles = troubles
        self.engine_lost_s: float | None = None

    def on_rank_event(self, event: RankEvent) -> None:
        if isinstance(event, RanksLost) and self._victim in event.dp_ranks:
            self._troubles.append(Trouble(time.monotonic(), is_loss=True))
        elif isinstance(event, EngineLost):
            self.engine_lost_s = time.monotonic()
        super().on_rank_event(event)


def _drawn(draws: random.Random) -> RecoveryConfig:
    return RecoveryConfig(
        max_rank_restarts=draws.choice([0, 1, 2, 3, 5]),
        restart_window_s=draws.choice([60.0, 300.0, 1000.0]),
        restart_backoff_s=draws.choice([0.5, 8.0, 20.0]),
        crash_loop_s=draws.choice([10.0, 30.0, 300.0]),
        max_restart_backoff_s=draws.choice([10.0, 30.0, 100.0]),
        placement_timeout_s=draws.choice([5.0, 20.0, 60.0]),
        standby_delay_s=None,
    )


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        api.init()
        self._cluster = cluster
        draws = self._draws = cluster.world.generator("the scenario")
        self._recovery = _drawn(draws)
        self._num_ranks = num_ranks
        self._victim = draws.randrange(num_ranks)
        self._troubles: list[Trouble] = cluster.world.systems.setdefault("troubles", [])
        whole = msgspec.structs.replace(config(num_ranks), recovery=self._recovery)
        self._manager = CoreEngineActorManager(whole, runtime=RayRuntime(FRAIL))
        self._listener = Losses(self._victim, self._troubles)
        self._supervisor = Supervisor(self._manager, self._listener, whole)
        self._neighbours: list[Any] = []

    def run(self) -> None:
        loses_room = self._draws.random() < 0.4
        self._cluster.world.tell(f"loses room: {loses_room}, {self._recovery}")
        if loses_room:
            self._fill(self._cluster.head)
        self._manager.start()
        self._supervisor.start()
        self._listener.wait_for(lambda: len(self._listener.up) == self._num_ranks, "all ranks are up")
        if loses_room:
            self._lose_room()
        else:
            self._lose_often()
        self._supervisor.stop()
        self._manager.stop_ranks()
        self._manager.shutdown()
        self._supervisor.join(5.0)
        for each in self._neighbours:
            kill(each)
        time.sleep(90.0)
        check_nothing_left(self._cluster)

    @property
    def _is_given_up(self) -> bool:
        return self._supervisor.watches()[self._victim].has_given_up

    def _starts_s(self) -> list[float]:
        """When Ray was asked to start the victim again."""
        actors = self._cluster.gcs.actors.values()
        return [each.asked_s for each in actors if f"_dp{self._victim}_" in each.name]

    # ---- it is lost again and again

    def _lose_often(self) -> None:
        """Kill the victim, or have its starts fail, until it is given up, or for some times."""
        most_s = _START_S + self._recovery.max_restart_backoff_s
        for _ in range(self._draws.randint(1, 8)):
            time.sleep(self._draws.choice([0.0, self._draws.uniform(0.0, 5.0), self._draws.uniform(0.0, _UP_S)]))
            fails = self._draws.choice([0, 0, 1, 2, 3])
            self._cluster.world.systems["failures of starts"] = {self._victim: fails}
            pid = self._listener.up[self._victim]
            self._cluster.world.kill(next(each for each in self._cluster.world.processes if each.pid == pid))
            self._listener.wait_for(
                lambda pid=pid: self._is_given_up or self._listener.up.get(self._victim, pid) != pid,
                "the rank is up again, or given up",
                most_s * (fails + 1),
            )
            if self._is_given_up:
                break
        self._check_starts()

    def _check_starts(self) -> None:
        """Each trouble is followed by a start, after the pause that it should have, as long as there may be any."""
        starts_s, recovery, loss_s = self._starts_s(), self._recovery, 0.0
        self._cluster.world.tell(f"{self._troubles}, starts at {starts_s}, given up: {self._is_given_up}")
        assert len(starts_s) <= len(self._troubles), f"{len(starts_s)} starts for {self._troubles}"
        for index, trouble in enumerate(self._troubles):
            before, loss_s = starts_s[:index], trouble.at_s if trouble.is_loss else loss_s
            least, most = (
                sum(each > loss_s - recovery.restart_window_s + slack_s for each in before)
                for slack_s in (_SLACK_S, -_SLACK_S)
            )
            if index == len(starts_s):
                assert self._is_given_up, f"nobody has started the rank again after {trouble}"
                assert most >= recovery.max_rank_restarts, f"it was given up after {most} starts: {recovery}"
                return
            assert least < recovery.max_rank_restarts, f"it was started for the {least + 1}th time: {recovery}"
            pauses_s = [
                self._pause_s(sum(each > trouble.at_s - recovery.crash_loop_s + slack_s for each in before))
                for slack_s in (-_SLACK_S, 0.0, _SLACK_S)
            ]
            took_s = starts_s[index] - trouble.at_s
            assert min(pauses_s) - _ABOUT_S <= took_s <= max(pauses_s) + _SLACK_S, (
                f"after {len(before)} starts, the next one came after {took_s:.1f} s, not after {pauses_s}: {recovery}"
            )

    def _pause_s(self, num_recent: int) -> float:
        recovery = self._recovery
        if not num_recent:
            return 0.0
        return min(recovery.max_restart_backoff_s, recovery.restart_backoff_s * 2 ** (num_recent - 1))

    # ---- there is no room

    def _fill(self, node: Node) -> None:
        """Have another actor use all that is free on a node."""
        if node.free["CPU"]:
            options = {"num_cpus": node.free["CPU"], "scheduling_strategy": on_node(node.id)}
            neighbour = NEIGHBOUR.options(**options).remote()
            get(neighbour.is_there.remote())
            self._neighbours.append(neighbour)
            time.sleep(_SHOWN_S)

    def _lose_room(self) -> None:
        """Lose nodes with ranks while there is no room elsewhere.

        As long as others serve, a rank waits. Otherwise each attempt waits for as long as the options say, and counts.
        """
        for node in self._cluster.nodes:
            self._fill(node)
        nodes = {node.id: node for node in self._cluster.nodes}
        ranks = self._manager.ranks.values()
        used = list(dict.fromkeys(nodes[rank.nodes[0]] for rank in ranks))
        assert self._cluster.head not in used
        lost = used if self._draws.random() < 0.5 else [nodes[self._manager.ranks[self._victim].nodes[0]]]
        began_s = time.monotonic()
        for node in lost:
            node.crash()
        if lost != used:
            self._wait_with_others()
        else:
            self._wait_alone(began_s)

    def _wait_with_others(self) -> None:
        """All that were lost come back when there is room again."""
        recovery = self._recovery
        time.sleep(_NOTICED_S + 3 * recovery.max_rank_restarts * recovery.placement_timeout_s)
        if recovery.max_rank_restarts:
            assert not self._is_given_up, f"a rank was given up while others serve: {recovery}"
        kill(self._neighbours.pop(0))
        room = int(self._cluster.head.total["CPU"])
        num_serving = len(self._listener.up)
        wanted = min(self._num_ranks, num_serving + room) if recovery.max_rank_restarts else num_serving
        self._listener.wait_for(lambda: len(self._listener.up) == wanted, "those are up that have room", _BACK_S)

    def _wait_alone(self, began_s: float) -> None:
        recovery = self._recovery
        least_s = recovery.max_rank_restarts * recovery.placement_timeout_s
        pauses_s = recovery.max_rank_restarts * (recovery.max_restart_backoff_s + _SLACK_S)
        most_s = _NOTICED_S + least_s + pauses_s + recovery.placement_timeout_s
        self._listener.wait_for(lambda: self._listener.engine_lost_s is not None, "the engine has failed", most_s)
        assert self._listener.engine_lost_s is not None
        took_s = self._listener.engine_lost_s - max(began_s, self._troubles[0].at_s)
        assert took_s >= least_s - _ABOUT_S, f"it failed after {took_s:.1f} s, not after {least_s:g}: {recovery}"


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    Program(cluster, num_ranks).run()


def _starts_are_counted_twice() -> None:
    original = RestartBudget.next_delay_s

    def next_delay_s(self: RestartBudget, now_s: float, lost_s: float | None = None) -> float | None:
        delay_s = original(self, now_s, lost_s)
        self._starts_s.extend(self._starts_s and [self._starts_s[-1]])
        return delay_s

    substitute(RestartBudget, "next_delay_s", next_delay_s)


def _lost_ranks_do_not_wait_for_room() -> None:
    original: Any = Reservations.for_successors

    def for_successors(self: Reservations, *args: Any) -> Any:
        self._patience_s = -1.0
        return original(self, *args)

    substitute(Reservations, "for_successors", for_successors)


FAULTS = [
    PutIn(_starts_are_counted_twice, 2, "it was given up after"),
    PutIn(_lost_ranks_do_not_wait_for_room, 0, "it failed after"),
]
