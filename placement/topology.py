"""The cluster as it is now: nodes, what they have, what is free.

Only the functions here talk to anybody; everything else takes the `ClusterView` that `read_cluster()` returns.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NodeView:
    """One node, as Ray reports it. Resources are by name (`CPU`, `GPU`, custom ones)."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    alive: bool = True
    draining: bool = False
    port: int = 0
    """Where its node daemon listens; 0 where that isn't known."""

    @property
    def usable(self) -> bool:
        """Whether something new may be placed here."""
        return self.alive and not self.draining


@dataclass(frozen=True)
class ClusterView:
    """The nodes, in the order in which they are filled: the caller's own first, then by address."""

    nodes: tuple[NodeView, ...] = field(default=())

    def without(self, node_ids: Collection[str]) -> ClusterView:
        """The view without some nodes."""
        return ClusterView(tuple(node for node in self.nodes if node.node_id not in node_ids))

    @property
    def usable_nodes(self) -> tuple[NodeView, ...]:
        """The nodes where something new may be placed."""
        return tuple(node for node in self.nodes if node.usable)


def read_cluster() -> ClusterView:
    """Read the view from the Ray that this process is connected to; takes a few milliseconds.

    What is available may be a moment old, so a group that fits it can still find its place taken.
    """
    # here, so that planning needs no Ray
    import ray
    from ray._private.state import state

    # ray.available_resources() adds all nodes up: what each has free has no public spelling
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
    """The ids of the nodes that are to go: cheaper than `read_cluster()`."""
    from ray._private.state import state

    draining: dict[str, int] = state.get_draining_nodes()
    return set(draining)


def answers(node: NodeView, timeout_s: float = 1.0) -> bool:
    """Whether a node's daemon takes connections. Ray itself takes 10 seconds and more to find a crashed node dead."""
    if not node.port:
        return True
    try:
        socket.create_connection((node.ip, node.port), timeout_s).close()
    except OSError:
        return False
    return True


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Without the resources by which Ray names nodes and the bundles of groups."""
    return {name: amount for name, amount in resources.items() if "_group_" not in name and ":" not in name}
