"""The cluster's current state: its nodes, their resources, and how much of these is free.

`read_cluster()` queries the cluster. Planning works on the `ClusterView` that it returns.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from raycore.system import socket


@dataclass(frozen=True)
class NodeView:
    """One node, as Ray reports it. `total` and `available` map resource names, such as `CPU`, to amounts."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    alive: bool = True
    draining: bool = False
    port: int = 0
    """Port of the node's raylet; 0 if unknown."""

    @property
    def usable(self) -> bool:
        """Whether new placement groups may be placed on this node."""
        return self.alive and not self.draining


@dataclass(frozen=True)
class ClusterView:
    """The nodes of a cluster, in the order in which ranks fill them: first this process's node, then by address."""

    nodes: tuple[NodeView, ...] = field(default=())

    def without(self, node_ids: Collection[str]) -> ClusterView:
        """This view without the given nodes."""
        return ClusterView(tuple(node for node in self.nodes if node.node_id not in node_ids))

    @property
    def usable_nodes(self) -> tuple[NodeView, ...]:
        """The nodes on which new placement groups may be placed."""
        return tuple(node for node in self.nodes if node.usable)


def read_cluster() -> ClusterView:
    """Read the nodes of the Ray cluster that this process is connected to. Takes a few milliseconds.

    The available amounts may be slightly out of date, so a plan made from them can turn out not to fit.
    """
    # imported here, so that planning doesn't need Ray
    import ray
    from ray._private.state import state

    # ray.available_resources() is a sum over nodes; Ray has no public API for each node's free resources
    available: dict[str, dict[str, float]] = state.available_resources_per_node()
    draining = draining_nodes()
    nodes: list[dict[str, Any]] = ray.nodes()
    own = ray.get_runtime_context().get_node_id()
    views = [
        NodeView(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            total=_plain(node["Resources"]),
            available=_plain(available.get(node["NodeID"], {})),
            alive=node["Alive"],
            draining=node["NodeID"] in draining,
            port=node.get("NodeManagerPort", 0),
        )
        for node in nodes
    ]
    return ClusterView(tuple(sorted(views, key=lambda node: (node.node_id != own, node.ip, node.node_id))))


def draining_nodes() -> set[str]:
    """The ids of the nodes that Ray is draining. Takes less time than `read_cluster()`."""
    from ray._private.state import state

    draining: dict[str, int] = state.get_draining_nodes()
    return set(draining)


def free_in_group(group_id: str) -> dict[tuple[int, str], float]:
    """What is free in a created placement group: the amount, by the bundle's index and the resource's name."""
    from ray._private.state import state

    available: dict[str, dict[str, float]] = state.available_resources_per_node()
    free: dict[tuple[int, str], float] = {}
    for resources in available.values():
        for name, amount in resources.items():
            # Ray counts a bundle's part of a resource as `CPU_group_INDEX_ID`, and the group's as `CPU_group_ID`
            resource, _, bundle = name.partition("_group_")
            index, _, owner = bundle.partition("_")
            if owner == group_id:
                free[int(index), resource] = amount
    return free


def answers(node: NodeView, timeout_s: float = 1.0) -> bool:
    """Whether a node's raylet accepts connections. True if the raylet's port is unknown.

    Ray itself takes 10 seconds or more to notice a crashed node.
    """
    if not node.port:
        return True
    try:
        socket.create_connection((node.ip, node.port), timeout_s).close()
    except OSError:
        return False
    return True


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """The resources without those that stand for a node, and those of placement groups' bundles."""
    return {
        name: amount for name, amount in resources.items() if "_group_" not in name and not name.startswith("node:")
    }
