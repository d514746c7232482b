"""Plans which node hosts each bundle of each rank. Pure: reads only a `ClusterView` and an `EngineShape`.

A *rank* is an engine process and its workers. Its bundles are those of the `world_size` workers, then one for the
engine process (index `world_size`). With `engine_cpus=0`, it has no bundle of its own and runs in bundle 0, the first
worker's: it hosts the only worker, or reserves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from placement.errors import PlacementShortage
from placement.topology import ClusterView, NodeView

Bundle = Mapping[str, float]
"""Resource amounts by name, as in a Ray placement group."""

Strategy = Literal["strict", "fill", "span"]
"""How ranks are assigned to nodes.

* `strict`: a rank never spans nodes, and every node in use holds the same number of ranks. Uses as many nodes as
  possible. Ranks that are replaced or added later make the numbers equal again, or at least as even as possible.
* `fill`: a rank never spans nodes. Fills the first node, then the next.
* `span`: a rank whose workers fit on one node is placed as with `fill`. Of a larger rank, each tensor-parallel group is
  placed on one node if any node can hold the whole group; otherwise the group's workers are placed one by one.
"""

_TOLERANCE = 1e-6
"""Allows for rounding in sums of floats. Ray's own resolution is 1e-4."""


@dataclass(frozen=True)
class EngineShape:
    """The resources that an engine requests: `num_ranks` ranks that each need the same bundles."""

    num_ranks: int
    world_size: int
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    engine_cpus: float = 1.0
    """CPUs of the engine process. 0: it hosts the worker or reserves nothing, and needs no bundle of its own."""
    strategy: Strategy = "fill"
    tensor_parallel_size: int | None = None
    """Workers per tensor-parallel group. The workers of a group are consecutive in the rank. None: a rank is one group.
    """
    node_id: str | None = None
    """The id of the node that hosts the first `num_there` ranks. None: any nodes may host any ranks."""
    num_there: int | None = None
    """How many of the ranks are on that node. The others are on other nodes. None: all are there."""
    others_per_worker: Bundle = field(default_factory=dict[str, float], hash=False)
    """What a worker needs of other resources."""

    @property
    def worker_bundle(self) -> Bundle:
        """The resources of one worker."""
        amounts = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker, **self.others_per_worker}
        return {name: amount for name, amount in amounts.items() if amount}

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of one rank: one per worker, then the engine process's."""
        engine = ({"CPU": self.engine_cpus},) if self.engine_cpus else ()
        return (self.worker_bundle,) * self.world_size + engine

    @property
    def engine_bundle_index(self) -> int:
        """Index of the bundle in which the engine process runs."""
        return self.world_size if self.engine_cpus else 0

    @property
    def parts(self) -> list[EngineShape]:
        """The ranks on node `node_id`, and those on other nodes: each part is placed by itself."""
        if not self.num_there or self.node_id is None:
            return [self]
        num_there = min(self.num_there, self.num_ranks)
        there = replace(self, num_ranks=num_there, num_there=None)
        return [there, replace(self, num_ranks=self.num_ranks - num_there, num_there=0)]

    @property
    def num_cpus(self) -> float:
        """Number of CPUs that all ranks need together."""
        return self.num_ranks * sum(bundle.get("CPU", 0.0) for bundle in self.bundles)


@dataclass(frozen=True)
class RankPlan:
    """Placement of one rank: `bundles[i]` goes to node `node_ids[i]`."""

    dp_rank: int
    bundles: tuple[Bundle, ...]
    node_ids: tuple[str, ...]

    @property
    def group_strategy(self) -> Literal["STRICT_PACK", "PACK"]:
        """Ray's strategy for the rank's placement group."""
        return "STRICT_PACK" if len(set(self.node_ids)) == 1 else "PACK"


def plan_ranks(
    view: ClusterView,
    shape: EngineShape,
    *,
    of: Literal["total", "available"] = "available",
    standing: Mapping[str, int] = MappingProxyType({}),
) -> list[RankPlan]:
    """Assign the ranks to the usable nodes.

    Args:
        of: which resources of the nodes to plan with: those `available` now, or the `total`, which tells whether the
            ranks would fit an idle cluster.
        standing: the number of the engine's other ranks on each node, by node id. The strategy `strict` counts them,
            too. If there are some, it accepts unequal numbers, as even as possible, where equal ones are impossible.

    Raises:
        PlacementShortage: the ranks don't fit. The message is the table of `describe_shortage()`.
    """
    placed: list[tuple[str, ...]] = []
    for part in shape.parts:
        nodes = _allowed_nodes(view, part)
        rooms = [_Room(node, node.total if of == "total" else node.available) for node in nodes]
        beside = {node_id: count for node_id, count in standing.items() if _is_allowed(node_id, part)}
        of_part = _place(rooms, part, beside) if part.num_ranks else []
        if of_part is None:
            raise PlacementShortage(describe_shortage(view, shape))
        placed += of_part
    return [RankPlan(dp_rank, shape.bundles, node_ids) for dp_rank, node_ids in enumerate(placed)]


def evener_node(view: ClusterView, shape: EngineShape, node_id: str, standing: Mapping[str, int]) -> str | None:
    """A node to which a rank on node `node_id` should move when it restarts, if the strategy is `strict`.

    It has room for the rank, and at least two ranks fewer, so the move makes the numbers more even. None if there is no
    such node. `standing` counts the ranks on each node, this one included.
    """
    if shape.num_there is not None:
        if node_id == shape.node_id:
            return None
        shape = replace(shape, num_there=0)
    most = standing.get(node_id, 0) - 2
    nodes = [node for node in _allowed_nodes(view, shape) if standing.get(node.node_id, 0) <= most]
    room = _first_fit([_Room(node, node.available) for node in nodes], shape.bundles)
    return room.node_id if room is not None else None


def describe_shortage(view: ClusterView, shape: EngineShape) -> str:
    """A message for people: what was requested, and a table of what each node has."""
    rule = {
        "strict": "each on one node, the same number on every node",
        "fill": "each on one node",
        "span": "a rank may span nodes",
    }[shape.strategy]
    lines = [
        f"{_count(shape.num_ranks, 'rank')} of {_count(shape.world_size, 'worker')} "
        f"{'do' if shape.num_ranks > 1 else 'does'}n't fit the cluster "
        f"(strategy {shape.strategy!r}: {rule}{_where(shape)})",
        f"each rank needs {_describe_rank(shape)}; in total: {_describe(_sum(shape.bundles * shape.num_ranks))}",
        *_table(view, shape),
        _advice(shape),
    ]
    return "\n".join(lines)


def describe_missing(view: ClusterView, shape: EngineShape, created: Mapping[str, Collection[str]]) -> str:
    """A message for people: which ranks are placed, what the missing ranks need, and a table of what each node has.

    Args:
        created: the node ids of each created placement group, by the group's name.
    """
    places = [f"{name} on {', '.join(sorted({node[:8] for node in nodes}))}" for name, nodes in created.items()]
    others = shape.bundles * (shape.num_ranks - len(created))
    lines = [
        f"{len(created)} of {_count(shape.num_ranks, 'rank')} placed" + (f" ({'; '.join(places)})" if places else ""),
        f"each missing rank needs {_describe_rank(shape)}; in total: {_describe(_sum(others))}",
        *_table(view, shape),
    ]
    return "\n".join(lines)


def _allowed_nodes(view: ClusterView, shape: EngineShape) -> list[NodeView]:
    """The usable nodes on which the ranks may be."""
    return [node for node in view.usable_nodes if _is_allowed(node.node_id, shape)]


def _is_allowed(node_id: str, shape: EngineShape) -> bool:
    """Whether the ranks may be on a node. `shape`: one of `EngineShape.parts`."""
    return shape.node_id is None or (node_id == shape.node_id) == (shape.num_there is None)


def _where(shape: EngineShape) -> str:
    if shape.node_id is None:
        return ""
    if shape.num_there is None or shape.num_there >= shape.num_ranks:
        return f"; all on this program's node, {shape.node_id[:8]}"
    return f"; {shape.num_there} on this program's node, {shape.node_id[:8]}, the others on other nodes"


class _Room:
    """The resources left on one node while ranks are placed."""

    def __init__(self, node: NodeView, resources: Mapping[str, float]) -> None:
        self.node_id = node.node_id
        self._left = dict(resources)

    def fits(self, bundles: Sequence[Bundle]) -> bool:
        """Whether the node has room for all of `bundles` at the same time."""
        return all(self._left.get(name, 0.0) + _TOLERANCE >= amount for name, amount in _sum(bundles).items())

    def take(self, bundles: Sequence[Bundle]) -> tuple[str, ...]:
        """Allocate `bundles`, which must fit. Returns this node's id once per bundle."""
        for name, amount in _sum(bundles).items():
            self._left[name] = self._left.get(name, 0.0) - amount
        return (self.node_id,) * len(bundles)

    def capacity(self, bundles: Sequence[Bundle]) -> int:
        """How many times all of `bundles` fit on the node."""
        wanted = {name: amount for name, amount in _sum(bundles).items() if amount}
        return min(int((self._left.get(name, 0.0) + _TOLERANCE) // amount) for name, amount in wanted.items())


_Placed = list[tuple[str, ...]] | None
"""For each rank, the node id of each bundle; None if the ranks don't fit."""


def _place(rooms: list[_Room], shape: EngineShape, standing: Mapping[str, int]) -> _Placed:
    if shape.strategy == "strict":
        return _place_strict(rooms, shape, standing) or (_place_level(rooms, shape, standing) if standing else None)
    return (_place_fill if shape.strategy == "fill" else _place_span)(rooms, shape)


def _place_fill(rooms: list[_Room], shape: EngineShape) -> _Placed:
    placed: list[tuple[str, ...]] = []
    for room in rooms:
        while len(placed) < shape.num_ranks and room.fits(shape.bundles):
            placed.append(room.take(shape.bundles))
    return placed if len(placed) == shape.num_ranks else None


def _place_strict(rooms: list[_Room], shape: EngineShape, standing: Mapping[str, int]) -> _Placed:
    """Place the same number of ranks on as many nodes as possible, counting the `standing` ranks."""
    num_ranks = shape.num_ranks + sum(standing.values())
    rooms = sorted(rooms, key=lambda room: room.node_id not in standing)  # nodes in use have to be among those chosen
    fewest = 2 if standing else 1  # all ranks on one node are even, too, but added ones should rather use other nodes
    for num_nodes in range(min(len(rooms), num_ranks), fewest - 1, -1):
        if num_ranks % num_nodes:
            continue
        missing = {room: num_ranks // num_nodes - standing.get(room.node_id, 0) for room in rooms}
        fitting = [room for room, number in missing.items() if 0 <= number <= room.capacity(shape.bundles)]
        added = {room: missing[room] for room in fitting[:num_nodes]}
        if len(added) == num_nodes and sum(added.values()) == shape.num_ranks:
            return [room.take(shape.bundles) for room, number in added.items() for _ in range(number)]
    return None


def _place_level(rooms: list[_Room], shape: EngineShape, standing: Mapping[str, int]) -> _Placed:
    """Place each rank on the node with the fewest ranks."""
    counts = Counter(standing)
    placed: list[tuple[str, ...]] = []
    for _ in range(shape.num_ranks):
        room = _first_fit(sorted(rooms, key=lambda room: counts[room.node_id]), shape.bundles)
        if room is None:
            return None
        counts[room.node_id] += 1
        placed.append(room.take(shape.bundles))
    return placed


def _place_span(rooms: list[_Room], shape: EngineShape) -> _Placed:
    """Place the workers of all ranks first, because they are harder to place. Then place each engine process, on the
    node of its first worker if possible."""
    workers: list[tuple[str, ...]] = []
    for _ in range(shape.num_ranks):
        placed = _place_workers(rooms, shape)
        if placed is None:
            return None
        workers.append(placed)
    if not shape.engine_cpus:
        return workers
    engine = shape.bundles[shape.world_size :]
    ranks: list[tuple[str, ...]] = []
    for node_ids in workers:
        room = _first_fit(sorted(rooms, key=lambda room: room.node_id != node_ids[0]), engine)
        if room is None:
            return None
        ranks.append(node_ids + room.take(engine))
    return ranks


def _place_workers(rooms: list[_Room], shape: EngineShape) -> tuple[str, ...] | None:
    """Place one rank's workers.

    Tried in this order: one node that also has room for the engine process; one node for all workers; one node for each
    tensor-parallel group; and for groups that fit on no node, a node for each worker.
    """
    workers = shape.bundles[: shape.world_size]
    room = _first_fit(rooms, shape.bundles) or _first_fit(rooms, workers)
    if room is not None:
        return room.take(workers)
    group_size = shape.tensor_parallel_size or shape.world_size
    node_ids: tuple[str, ...] = ()
    for start in range(0, shape.world_size, group_size):
        group = workers[start : start + group_size]
        room = _first_fit(rooms, group)
        for part in [group] if room is not None else [(worker,) for worker in group]:
            room = _first_fit(rooms, part)
            if room is None:
                return None
            node_ids += room.take(part)
    return node_ids


def _first_fit(rooms: Iterable[_Room], bundles: Sequence[Bundle]) -> _Room | None:
    return next((room for room in rooms if room.fits(bundles)), None)


def _sum(bundles: Sequence[Bundle]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _table(view: ClusterView, shape: EngineShape) -> list[str]:
    """One row per node: the free and total amount of each resource, and how many ranks would fit on the node now and if
    the node were idle."""
    names = list(_sum(shape.bundles))
    header = ["node", "address", *(f"{name} free/total" for name in names), "ranks now/ever"]
    rows = [
        [node.node_id[:8], node.ip, *_amounts(node, names), _capacities(node, shape)]
        for node in view.nodes
        if node.alive
    ]
    if not rows:
        return ["the cluster has no live node"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]


def _amounts(node: NodeView, names: Sequence[str]) -> list[str]:
    return [f"{node.available.get(name, 0):g}/{node.total.get(name, 0):g}" for name in names]


def _capacities(node: NodeView, shape: EngineShape) -> str:
    if node.draining:
        return "draining"
    now, ever = (_Room(node, resources).capacity(shape.bundles) for resources in (node.available, node.total))
    return f"{now}/{ever}"


def _describe_rank(shape: EngineShape) -> str:
    workers = f"{_count(shape.world_size, 'worker')} of {_describe(shape.worker_bundle)}"
    return f"{workers}, an engine of CPU {shape.engine_cpus:g}" if shape.engine_cpus else workers


def _describe(bundle: Bundle) -> str:
    return " ".join(f"{name} {amount:g}" for name, amount in bundle.items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _advice(shape: EngineShape) -> str:
    span = "" if shape.strategy == "span" or shape.world_size == 1 else ", let ranks span nodes (strategy 'span')"
    return f"Request fewer ranks or workers{span}, free resources, or add nodes."
