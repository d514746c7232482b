"""Engines of each placement strategy in clusters of which others use a part: where they are, and whether there is room.

What an engine reserves is compared with a model that tries out all places: nothing is reserved that no rank needs, and
no engine fails for lack of room while there is some. Then one rank more is asked for.

`python -m simulation.program places FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

import msgspec

from placement import plan
from placement.errors import PlacementShortage
from placement.plan import EngineShape
from raycore.cluster import manager, reservations
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.runtime import RayRuntime
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig, ExecutorConfig, ParallelConfig, RecoveryConfig
from raycore.ray_api import actor_class, get, kill, on_node
from raycore.system import time
from raycore.worker.rank import RankIdentity
from simulation.neighbour import NEIGHBOUR
from simulation.program import PutIn
from simulation.putting_in import substitute
from simulation.ranks import FakeRank, Listener, config
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.faults import check_nothing_left
from simulation.ray.groups import Group
from simulation.ray.nodes import Node
from simulation.world.threads import world

_STEADY_S = 3.0
"""Virtual seconds after which all processes see what is free."""
_AT_ONCE_S = 8.0
"""Within so many, an engine fails for which not even the idle cluster has room, and nobody waits for resources."""
_DRAIN_S = 1500.0
"""For which a drained node goes on: longer than all that follows."""
_GPU_KIND = "accelerator_type:G1"

Amounts = Mapping[str, float]


class PlacedRank(FakeRank):
    """Notes which device it is to compute on."""

    def __init__(self, config_bytes: bytes, identity: RankIdentity, bundles: object, name: str) -> None:
        super().__init__(config_bytes, identity, bundles, name)
        devices: list[str] = world().systems.setdefault("devices of ranks", [])
        devices.append(EngineConfig.decode(config_bytes).device)


PLACED_RANK = actor_class(PlacedRank, concurrency_groups={"run": 1, "io": 1})


class Wanted:
    """What an engine asks for."""

    def __init__(self, draws: random.Random, num_ranks: int, *, has_gpus: bool) -> None:
        self.strategy = draws.choice(["fill", "strict", "span", "span"])
        self.num_ranks = num_ranks
        self.num_workers = draws.choice([1, 2, 2, 3]) if self.strategy == "span" else draws.choice([1, 1, 2])
        self.device = draws.choice(["auto", "auto", "cpu"])
        is_on_gpus = self.device == "auto" and has_gpus
        self.device_of_ranks = "cuda" if is_on_gpus else "cpu"
        self.worker: Amounts = {"CPU": 1.0, "GPU": 1.0} if is_on_gpus else {"CPU": 1.0}
        has_engine_of_its_own = self.num_workers > 1 or draws.random() < 0.5
        self.backend = "ray" if has_engine_of_its_own else "inline"
        self.engine: Amounts = {"CPU": 1.0} if has_engine_of_its_own else {}
        self.timeout_s = draws.choice([3.0, 10.0])

    @property
    def bundles(self) -> list[Amounts]:
        return [self.worker] * self.num_workers + ([self.engine] if self.engine else [])

    @property
    def rank(self) -> Amounts:
        """What a rank needs in all."""
        return _sum(self.bundles)

    def config(self) -> EngineConfig:
        parallel = ParallelConfig(self.num_workers, self.num_ranks, placement_strategy=self.strategy)
        return msgspec.structs.replace(
            config(self.num_ranks),
            device=self.device,
            parallel=parallel,
            recovery=RecoveryConfig(standby_delay_s=None, placement_timeout_s=self.timeout_s),
            executor=ExecutorConfig(self.backend, init_timeout_s=300.0, shutdown_timeout_s=5.0),
        )

    def has_room(self, free: Sequence[Amounts], num_added: int, *, is_new: bool) -> bool:
        """Whether so many ranks fit into what nodes have free."""
        if self.strategy == "span":
            return self._can_span(free, num_added)
        rooms = [_times(each, self.rank) for each in free]
        if self.strategy == "fill" or not is_new:
            return sum(rooms) >= num_added
        return bool(_even_numbers(rooms, num_added))

    def _can_span(self, free: Sequence[Amounts], num_added: int) -> bool:
        """Try out all numbers of workers and engines on each node."""
        num_workers, num_engines = num_added * self.num_workers, num_added if self.engine else 0
        reached = {(0, 0)}
        for each in free:
            held = [
                (workers, engines)
                for workers in range(num_workers + 1)
                for engines in range(num_engines + 1)
                if _fits(each, _sum([self.worker] * workers + [self.engine] * engines))
            ]
            reached = {
                (min(num_workers, before + more), min(num_engines, engines_before + engines))
                for before, engines_before in reached
                for more, engines in held
            }
        return (num_workers, num_engines) in reached


def _even_numbers(rooms: Sequence[int], num_ranks: int) -> list[int]:
    """On how many nodes there may be the same number of ranks."""
    return [
        number
        for number in range(1, len(rooms) + 1)
        if num_ranks % number == 0 and sum(room >= num_ranks // number for room in rooms) >= number
    ]


def _sum(bundles: Sequence[Amounts]) -> Amounts:
    total: Counter[str] = Counter()
    for each in bundles:
        total.update(each)  # pyright: ignore[reportArgumentType]
    return total


def _fits(free: Amounts, needed: Amounts) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in needed.items())


def _times(free: Amounts, needed: Amounts) -> int:
    return int(min(free.get(name, 0.0) // amount for name, amount in needed.items() if amount))


def _shortage(act: Callable[[], object]) -> PlacementShortage | None:
    """What is missing, if something is."""
    try:
        act()
    except PlacementShortage as error:
        return error
    return None


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._cluster = cluster
        draws = self._draws = cluster.world.generator("the scenario")
        self._has_gpus = draws.random() < 0.5
        for _ in range(draws.choice([0, 1, 2])):
            gpus: dict[str, float] = {"GPU": float(draws.randint(1, 3)), _GPU_KIND: 1.0} if self._has_gpus else {}
            cluster.add_node(CPU=float(draws.randint(1, 6)), **gpus)
        self._has_gpus &= len(cluster.nodes) > 3
        api.init()
        self._neighbours = [each for node in cluster.nodes for each in self._neighbours_on(node)]
        if draws.random() < 0.2:
            draws.choice(cluster.nodes[1:]).drain(_DRAIN_S)
        time.sleep(_STEADY_S)
        self._wanted = Wanted(draws, num_ranks, has_gpus=self._has_gpus)
        self._usable = [node for node in cluster.nodes if node.takes_actors and not node.is_lost]

    def _neighbours_on(self, node: Node) -> Iterator[Any]:
        draws = self._draws
        used = {"num_cpus": draws.randint(0, int(node.total["CPU"])), "num_gpus": 0}
        if node.total.get("GPU"):
            used["num_gpus"] = draws.choice([0, 0, 1])
        if draws.random() < 0.5 and any(used.values()):
            neighbour = NEIGHBOUR.options(**used, scheduling_strategy=on_node(node.id)).remote()
            get(neighbour.is_there.remote())
            yield neighbour

    def run(self) -> None:
        wanted = self._wanted
        self._cluster.world.tell(f"asks for {vars(wanted)}")
        free, idle = self._free(), [node.total for node in self._usable]
        ranks = CoreEngineActorManager(wanted.config(), runtime=RayRuntime(PLACED_RANK))
        began_s = time.monotonic()
        shortage = _shortage(ranks.start)
        took_s = time.monotonic() - began_s
        has_room = wanted.has_room(free, wanted.num_ranks, is_new=True)
        assert has_room == (shortage is None), f"room for {vars(wanted)} in {free}: {has_room}, and {shortage!r}"
        if shortage is None:
            self._check(wanted.num_ranks)
            self._check_new(free)
            self._grow(ranks)
            ranks.shutdown()
        else:
            is_ever = wanted.has_room(idle, wanted.num_ranks, is_new=True)
            is_in_time = took_s >= wanted.timeout_s if is_ever else took_s < _AT_ONCE_S
            assert is_in_time, f"waited {took_s:.1f} s, and has room when others end: {is_ever}"
        for each in self._neighbours:
            kill(each)
        time.sleep(90.0)
        check_nothing_left(self._cluster)

    def _free(self) -> list[Amounts]:
        return [dict(node.free) for node in self._usable]

    def _groups(self) -> list[Group]:
        return [group for group in self._cluster.gcs.groups.values() if group.state != "REMOVED"]

    def _check(self, num_ranks: int) -> None:
        """Each rank has its group, of what it needs, as the strategy allows it, and computes where it was meant to."""
        wanted, groups = self._wanted, self._groups()
        assert len(groups) == num_ranks, f"{num_ranks} ranks have {groups}"
        for group in groups:
            assert group.bundles == [dict(each) for each in wanted.bundles], f"{group} has {group.bundles}"
            assert set(group.nodes) <= set(self._usable), f"{group} is on {group.nodes}"
            if wanted.strategy != "span":
                assert len(set(group.nodes)) == 1, f"{group} is on {group.nodes}"
        devices = world().systems["devices of ranks"]
        assert set(devices) == {wanted.device_of_ranks}, f"ranks compute on {devices}, not on {wanted.device_of_ranks}"

    def _check_new(self, free: Sequence[Amounts]) -> None:
        """What the strategy says of a new engine's ranks together."""
        wanted, counts = self._wanted, self._counts()
        rooms = [_times(each, wanted.rank) for each in free]
        if wanted.strategy == "strict":
            most = max(_even_numbers(rooms, wanted.num_ranks))
            assert len(set(counts.values())) == 1, f"the numbers of ranks on nodes differ: {counts}"
            assert len(counts) == most, f"{most} nodes could be used, and {counts} are"
        elif wanted.strategy == "fill":
            used = [(node, room) for node, room in zip(self._usable, rooms, strict=True) if room]
            for (node, room), (later, _) in pairwise(used):
                assert counts[node] == room or not counts[later], f"{node} has room, and there are {counts}"

    def _counts(self) -> Counter[Node]:
        return Counter(group.nodes[0] for group in self._groups() if group.nodes[0] is not None)

    def _grow(self, ranks: CoreEngineActorManager) -> None:
        """Ask for one rank more."""
        wanted, listener = self._wanted, Listener()
        supervisor = Supervisor(ranks, listener, wanted.config())
        supervisor.start()
        time.sleep(_STEADY_S)
        free, before = self._free(), self._counts()
        has_room = wanted.has_room(free, 1, is_new=False)
        shortage = _shortage(lambda: supervisor.scale(wanted.num_ranks + 1))
        assert has_room == (shortage is None), f"room for one more in {free}: {has_room}, and {shortage!r}"
        self._check(wanted.num_ranks + has_room)
        if has_room and wanted.strategy == "strict":
            self._check_added(before, free)
        supervisor.stop()
        ranks.stop_ranks()
        supervisor.join(5.0)

    def _check_added(self, before: Counter[Node], free: Sequence[Amounts]) -> None:
        """The numbers of ranks are equal again, or as even as they can be."""
        after = self._counts()
        (node,) = after - before
        rooms = [each for each, left in zip(self._usable, free, strict=True) if _fits(left, self._wanted.rank)]
        is_even = len(after) > 1 and len(set(after.values())) == 1
        least = min(before[each] for each in rooms)
        assert is_even or before[node] == least, f"one more is on {node}, of {before} and room on {rooms}"


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    Program(cluster, num_ranks).run()


def _ranks_are_reserved_twice() -> None:
    original: Any = vars(reservations)["reserve"]

    def reserve(shape: EngineShape, **options: Any) -> Any:
        original(shape, **options)
        return original(shape, **options)

    substitute(reservations, "reserve", reserve)


def _even_ranks_are_on_few_nodes() -> None:
    substitute(plan, "_place_strict", lambda rooms, shape, standing: plan._place_fill(rooms, shape))


def _ranks_that_span_nodes_need_one() -> None:
    substitute(plan, "_place_span", plan._place_fill)


def _engines_do_not_look_for_gpus() -> None:
    substitute(manager, "choose_device", lambda view: "cpu")


FAULTS = [
    PutIn(_ranks_are_reserved_twice, 0, "ranks have"),
    PutIn(_even_ranks_are_on_few_nodes, 17, "nodes could be used"),
    PutIn(_ranks_that_span_nodes_need_one, 10, "room for"),
    PutIn(_engines_do_not_look_for_gpus, 0, "has [{"),
]
