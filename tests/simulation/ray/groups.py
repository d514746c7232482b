"""Placement groups: bundles of resources on nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulation.ray.nodes import Node, Pool
from simulation.ray.objects import here
from simulation.world.threads import world

if TYPE_CHECKING:
    from simulation.ray.gcs import Gcs
    from simulation.ray.workers import Worker

_NODE_ID = "ray.io/node-id"
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
SHARE_LEAKED = 0.01
"""Of the groups that are removed while they are created: those that never return their resources."""


class Group:
    """What the control store knows of a placement group."""

    def __init__(
        self,
        gcs: Gcs,
        creator: Worker,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        name: str,
        selectors: Sequence[Mapping[str, str]] | None,
    ) -> None:
        self.cluster = gcs.cluster
        self.creator = creator
        self.id = gcs.cluster.new_id(18)
        self.bundles = [{key: float(amount) for key, amount in bundle.items()} for bundle in bundles]
        self.strategy = strategy
        self.name = name
        self.selectors = list(selectors or [{}] * len(bundles))
        self.state = "PENDING"
        self.pools = [Pool(bundle) for bundle in self.bundles]
        self.nodes: list[Node | None] = [None] * len(bundles)

    def __repr__(self) -> str:
        return f"group {self.name.partition(':')[0] or 'without a name'}"

    def place(self, nodes: Sequence[Node]) -> list[Node] | None:
        """A node for each bundle that has none. None: they don't fit."""
        missing = [index for index, node in enumerate(self.nodes) if node is None]
        if self.strategy.startswith("STRICT_PACK"):
            placed = [node for node in self.nodes if node is not None]
            candidates = [[node] for node in nodes if not placed or node is placed[0]]
        else:
            candidates = [[node] for node in nodes] + [list(nodes)]
        for among in candidates:
            found = self._fit(missing, among)
            if found is not None:
                return found
        return None

    def _fit(self, missing: Sequence[int], nodes: Sequence[Node]) -> list[Node] | None:
        free = {node.id: Pool(node.free) for node in nodes}
        found: list[Node] = []
        for index in missing:
            for node in nodes:
                if _matches(self.selectors[index], node) and free[node.id].fits(self.bundles[index]):
                    free[node.id].take(self.bundles[index])
                    found.append(node)
                    break
            else:
                return None
        return found

    def take(self, found: Sequence[Node]) -> None:
        """Take the resources of the bundles that have no node yet."""
        missing = [index for index, node in enumerate(self.nodes) if node is None]
        for index, node in zip(missing, found, strict=True):
            self.nodes[index] = node
            self.pools[index] = Pool(self.bundles[index])
            node.take(self.bundles[index])

    def show(self) -> None:
        """It has been created: actors can use its bundles."""
        for index, node in enumerate(self.nodes):
            if node is not None and (self, index) not in node.groups:
                node.groups.append((self, index))
                node.changed(released=False)

    def give_back(self, index: int) -> None:
        node = self.nodes[index]
        self.nodes[index] = None
        if node is not None:
            if (self, index) in node.groups:
                node.groups.remove((self, index))
            node.give_back(self.bundles[index])
            node.changed(released=True)

    def row(self) -> dict[str, Any]:
        """As `placement_group_table` shows it."""
        return {
            "placement_group_id": self.id,
            "name": self.name,
            "bundles": {index: dict(bundle) for index, bundle in enumerate(self.bundles)},
            "bundles_to_node_id": {index: node.id if node else "" for index, node in enumerate(self.nodes)},
            "strategy": self.strategy,
            "state": self.state,
        }


def _matches(selector: Mapping[str, str], node: Node) -> bool:
    for key, wanted in selector.items():
        if key != _NODE_ID:
            raise ValueError(f"the simulated Ray has no label {key!r}")
        refused = re.fullmatch(r"!in\((.*)\)", wanted)
        if node.id in refused[1].split(", ") if refused else node.id != wanted:
            return False
    return True


class PlacementGroupID:
    def __init__(self, binary: bytes) -> None:
        self._binary = binary

    def hex(self) -> str:
        return self._binary.hex()

    def binary(self) -> bytes:
        return self._binary

    def __hash__(self) -> int:
        return int.from_bytes(self._binary[:7], "big")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroupID) and other._binary == self._binary


class PlacementGroup:
    """A handle. It can be sent to other processes, and be made from an id."""

    def __init__(self, id: PlacementGroupID, bundle_cache: list[dict[str, float]] | None = None) -> None:
        self.id = id
        self.bundle_cache = bundle_cache

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and other.id == self.id

    @property
    def bundle_specs(self) -> list[dict[str, float]]:
        if self.bundle_cache is None:
            gcs, key = here().cluster.gcs, self.id.hex()
            self.bundle_cache = gcs.ask("bundles of a group", lambda: [dict(each) for each in gcs.groups[key].bundles])
        return self.bundle_cache

    @property
    def bundle_count(self) -> int:
        return len(self.bundle_specs)

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Takes whole seconds only, as Ray's does. Raises what Ray raises if it is removed."""
        gcs, key = here().cluster.gcs, self.id.hex()
        until_s = world().now_s + int(timeout_seconds)

        def is_created() -> bool:
            group = gcs.groups.get(key)
            if group is None or group.state == "REMOVED":
                raise Exception(f"Placement group PlacementGroupID({key}) does not exist.")
            return group.state == "CREATED"

        while not gcs.ask("whether a group is there", is_created):
            if world().now_s >= until_s:
                return False
            world().park("a placement group", min(0.02, until_s - world().now_s))
        return True


def placement_group(
    bundles: list[dict[str, float]],
    strategy: str = "PACK",
    name: str = "",
    lifetime: str | None = None,
    bundle_label_selector: list[dict[str, str]] | None = None,
    **_: Any,
) -> PlacementGroup:
    if strategy not in _STRATEGIES:
        raise ValueError(f"Invalid `strategy` argument {strategy}")
    worker = here()
    gcs = worker.cluster.gcs
    group = Group(gcs, worker, bundles, strategy, name, bundle_label_selector)
    gcs.ask("a placement group", lambda: gcs.add_group(group))
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group.id)), [dict(bundle) for bundle in bundles])


def remove_placement_group(group: PlacementGroup) -> None:
    gcs, key = here().cluster.gcs, group.id.hex()
    gcs.ask("the end of a placement group", lambda: gcs.remove_group(key))


def placement_group_table(group: PlacementGroup | None = None) -> dict[Any, Any]:
    gcs = here().cluster.gcs
    if group is None:
        return gcs.ask("the groups", lambda: {key: each.row() for key, each in gcs.groups.items()})
    key = group.id.hex()
    return gcs.ask("a group", lambda: gcs.groups[key].row() if key in gcs.groups else {})


def current_placement_group() -> PlacementGroup | None:
    incarnation = here().incarnation
    strategy = None if incarnation is None else incarnation.actor.strategy
    return getattr(strategy, "placement_group", None)
