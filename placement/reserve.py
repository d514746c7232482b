"""Take what was planned, and give it back: the only module of this package that changes the cluster."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from placement.errors import InvalidPlacementGroup, PlacementShortage, ReservationCancelled
from placement.plan import EngineShape, RankPlan, describe_missing, describe_shortage, plan_ranks
from placement.topology import ClusterView, read_cluster

logger = logging.getLogger(__name__)

_NODE_ID_LABEL = "ray.io/node-id"
"""The label that every Ray node carries; tells nodes apart that share an address."""

_ATTEMPT_TIMEOUT_S = 5.0
"""A group whose place was taken between planning and creation is planned anew after this long."""

_POLL_INTERVAL_S = 0.05
_NODE_POLL_INTERVAL_S = 0.25
"""A node takes seconds to come at best."""

_LOG_INTERVAL_S = 10.0
_RELEASE_TIMEOUT_S = 5.0
_SETTLE_TIMEOUT_S = 2.0
"""Groups that are to be removed may take so long to come to stand first, all of them together."""


def reserve(
    shape: EngineShape,
    *,
    names: Sequence[str] = (),
    avoid: Collection[str] = (),
    timeout_s: float = 60.0,
    asks_for_nodes: bool = False,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[PlacementGroup]:
    """Create one placement group for each rank, and wait until they stand.

    Waits, saying so, while others hold what the shape needs. The groups belong to the caller, who releases them; Ray
    removes them when this process ends.

    Args:
        names: the groups' names, one for each rank; by default they have none.
        avoid: ids of nodes that are not to be used.
        asks_for_nodes: have groups that don't fit wait in Ray, where an autoscaler sees each of them whole and adds
            nodes for it. Groups that stand meanwhile hold what they have. With the strategy `strict` a node may come
            to hold more ranks than another; they are then placed anew, on the nodes that there are.
        is_wanted: asked while waiting; once it says no, nothing more is.

    Raises:
        PlacementShortage: at once if the shape can never fit this cluster and `asks_for_nodes` is False, after
            `timeout_s` if it still doesn't fit. Nothing stays reserved.
        ReservationCancelled: it wasn't wanted any more. Nothing stays reserved.
    """
    waiting = _Waiting(shape, timeout_s, is_wanted)
    while True:
        view = read_cluster().without(avoid)
        if not asks_for_nodes:
            plan_ranks(view, shape, of="total")
        plans = _plan_if_free(view, shape)
        groups = _create(plans, names, waiting.left_s()) if plans is not None else None
        if groups is None and asks_for_nodes:
            groups = _ask(shape, names, avoid, waiting)
            asks_for_nodes = False
        if groups is not None:
            return groups
        waiting.step(view)


def release(groups: Sequence[PlacementGroup], timeout_s: float = _RELEASE_TIMEOUT_S) -> None:
    """Remove groups, and with them whatever still runs in them; returns once they are gone, or after `timeout_s`."""
    settled_s = time.monotonic() + _SETTLE_TIMEOUT_S
    for group in groups:
        # removed in the moment in which it comes to stand, 1 in 100 never gives back what it holds (Ray 2.60)
        if _state(group) in ("PENDING", "PREPARED"):
            group.wait(max(0.0, settled_s - time.monotonic()))
        remove_placement_group(group)
    deadline_s = time.monotonic() + timeout_s
    left = list(groups)
    while left and time.monotonic() < deadline_s:
        left = [group for group in left if _state(group) != "REMOVED"]
        if left:
            time.sleep(0.005)
    if left:
        logger.warning("Ray hasn't removed %d of %d placement groups within %g s", len(left), len(groups), timeout_s)


def groups_named(prefix: str) -> list[PlacementGroup]:
    """The groups of the cluster whose names begin with `prefix`, whoever made them, except those that are removed."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return [
        PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))
        for group_id, group in table.items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    ]


def validate_group(group: PlacementGroup, shape: EngineShape, timeout_s: float = 60.0) -> None:
    """Check that a caller's own group can hold one rank of `shape`; a pending one is waited for.

    Bundles 0 to `world_size - 1` are the workers', the next one the engine's. A group may have more of everything, and
    the engine's bundle when the engine needs none.

    Raises:
        InvalidPlacementGroup: it can't, with what it has and what it needs.
    """
    label = f"placement group {group.id.hex()[:12]}"
    needed = shape.bundles
    found: list[dict[str, Any]] = group.bundle_specs
    if len(found) < len(needed):
        engine = " and one for its engine" if shape.engine_cpus else ""
        raise InvalidPlacementGroup(
            f"{label} has {len(found)} bundles, but a rank needs {len(needed)}: "
            f"{shape.world_size} for its workers{engine}"
        )
    for index, (bundle, has) in enumerate(zip(needed, found, strict=False)):
        for resource, amount in bundle.items():
            if has.get(resource, 0.0) < amount:
                raise InvalidPlacementGroup(
                    f"bundle {index} of {label} has {resource} {has.get(resource, 0.0):g}, "
                    f"but the rank's {'engine' if index == shape.world_size else 'worker'} there needs {amount:g}"
                )
    if not _comes_to_stand(group, label, timeout_s):
        raise InvalidPlacementGroup(
            f"{label} is {_state(group)}, not CREATED (waited up to {timeout_s:g} s): "
            "bring one that exists and that the cluster can hold"
        )


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """The node id on which each bundle of a standing group lies."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes)]


class _Waiting:
    """Patience: a deadline, and what is said while it runs."""

    def __init__(
        self,
        shape: EngineShape,
        timeout_s: float,
        is_wanted: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = shape
        self._timeout_s = timeout_s
        self._is_wanted = is_wanted
        self._clock = clock
        self._started_s = clock()
        # what another engine has just given back shows up within a second
        self._next_log_s = self._started_s + 1.0

    def left_s(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self._started_s + self._timeout_s - self._clock())

    def step(self, view: ClusterView, standing: Mapping[str, Collection[str]] | None = None) -> None:
        """Sleep a little; at the deadline raise.

        Args:
            standing: while nodes are waited for, the ids of the nodes of each group that stands, by its name.
        """
        if not self._is_wanted():
            raise ReservationCancelled("the reservation isn't wanted any more")
        if self.left_s() <= 0:
            placed = "" if standing is None else f", with {len(standing)} of {self._shape.num_ranks} placed"
            raise PlacementShortage(
                f"{describe_shortage(view, self._shape)}\nWaited {self._timeout_s:g} s for it{placed}."
            )
        if self._clock() >= self._next_log_s:
            self._next_log_s = self._clock() + _LOG_INTERVAL_S
            shape = self._shape
            text = describe_shortage(view, shape) if standing is None else describe_missing(view, shape, standing)
            logger.warning("waiting up to %.0f s more: %s", self.left_s(), text)
        time.sleep(min(_POLL_INTERVAL_S if standing is None else _NODE_POLL_INTERVAL_S, self.left_s()))


def _plan_if_free(view: ClusterView, shape: EngineShape) -> list[RankPlan] | None:
    try:
        return plan_ranks(view, shape)
    except PlacementShortage:
        return None


def _create(plans: Sequence[RankPlan], names: Sequence[str], timeout_s: float) -> list[PlacementGroup] | None:
    """All groups, or none: None when one of them didn't get its place in time."""
    deadline_s = time.monotonic() + min(timeout_s, _ATTEMPT_TIMEOUT_S)
    groups: list[PlacementGroup] = []
    with ExitStack() as undo:
        undo.callback(release, groups)
        groups += [_create_one(plan, names[i] if names else "") for i, plan in enumerate(plans)]
        for group in groups:
            if not group.wait(max(0.0, deadline_s - time.monotonic())):
                return None
        undo.pop_all()
    return groups


def _ask(
    shape: EngineShape, names: Sequence[str], avoid: Collection[str], waiting: _Waiting
) -> list[PlacementGroup] | None:
    """Groups that Ray places where it can, once there is room for all; None if they don't lie as the strategy says."""
    # those that Ray knows to be dead it avoids itself
    avoid = [node.node_id for node in read_cluster().nodes if node.alive and node.node_id in avoid]
    groups: list[PlacementGroup] = []
    with ExitStack() as undo:
        undo.callback(release, groups)
        groups.extend(_create_anywhere(shape, avoid, name) for name in names or [""] * shape.num_ranks)
        while len(standing := _standing(groups, names)) < len(groups):
            waiting.step(read_cluster().without(avoid), standing)
        if shape.strategy == "strict" and not _are_even(standing.values()):
            logger.warning("the nodes that came hold unequal numbers of ranks, which strategy 'strict' rules out")
            return None
        undo.pop_all()
    return groups


def _create_anywhere(shape: EngineShape, avoid: Collection[str], name: str) -> PlacementGroup:
    elsewhere = {_NODE_ID_LABEL: f"!in({', '.join(sorted(avoid))})"} if avoid else {}
    return placement_group(
        bundles=[dict(bundle) for bundle in shape.bundles],
        strategy="PACK" if shape.strategy == "span" else "STRICT_PACK",
        name=name,
        bundle_label_selector=[elsewhere] * len(shape.bundles),
    )


def _standing(groups: Sequence[PlacementGroup], names: Sequence[str]) -> dict[str, list[str]]:
    """The node ids of each group that stands, by its name."""
    labels = names or [group.id.hex()[:12] for group in groups]
    return {
        label: bundle_nodes(group) for label, group in zip(labels, groups, strict=True) if _state(group) == "CREATED"
    }


def _are_even(nodes_of_ranks: Iterable[Sequence[str]]) -> bool:
    """Whether every node that is used holds as many ranks."""
    return len(set(Counter(nodes[0] for nodes in nodes_of_ranks).values())) == 1


def _comes_to_stand(group: PlacementGroup, label: str, timeout_s: float) -> bool:
    """Whether it stands within `timeout_s`; says so while it waits."""
    deadline_s = time.monotonic() + timeout_s
    # Ray raises a bare Exception when it is to wait for a group that is gone
    while _state(group) != "REMOVED":
        left_s = max(0.0, deadline_s - time.monotonic())
        if group.wait(min(left_s, _LOG_INTERVAL_S)):
            return True
        if left_s <= _LOG_INTERVAL_S:
            return False
        logger.warning("waiting up to %.0f s more for %s, which is %s", left_s - _LOG_INTERVAL_S, label, _state(group))
    return False


def _create_one(plan: RankPlan, name: str) -> PlacementGroup:
    return placement_group(
        bundles=[dict(bundle) for bundle in plan.bundles],
        strategy=plan.group_strategy,
        name=name,
        bundle_label_selector=[{_NODE_ID_LABEL: node_id} for node_id in plan.node_ids],
    )


def _state(group: PlacementGroup) -> str:
    try:
        table: dict[str, Any] = placement_group_table(group)
    except RayError as error:
        return f"unknown ({error})"
    return str(table.get("state", "REMOVED"))
