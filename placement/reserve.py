"""Creates, checks and removes placement groups: the only module of this package that changes the cluster."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from placement.errors import InvalidPlacementGroup, PlacementGroupRemoved, PlacementShortage, ReservationCancelled
from placement.plan import Bundle, EngineShape, RankPlan, describe_missing, describe_shortage, plan_ranks
from placement.topology import ClusterView, free_in_group, read_cluster
from raycore.system import time

logger = logging.getLogger(__name__)

_NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray sets on every node. Tells nodes apart that share an address."""

_ATTEMPT_TIMEOUT_S = 5.0
"""How long to wait for planned groups to be created. Then plan again: other jobs may have taken the resources."""

_LEAST_ATTEMPT_S = 2.0
"""Seconds that Ray has at least to create groups for which there is room, even if the time to wait has passed
meanwhile, as it may while Ray's control store is away. Ray counts whole seconds."""

_POLL_INTERVAL_S = 0.05
_LONG_POLL_INTERVAL_S = 0.25
"""Poll interval after `_SILENT_S`, while others hold the resources, or new nodes start, which takes seconds."""

_SILENT_S = 1.0
"""How long a wait goes on before anyone is told: Ray takes up to a second to show resources that were released."""

_RELEASE_TIMEOUT_S = 5.0
_SETTLE_TIMEOUT_S = 2.0
"""How long `release()` waits in total for groups that are still being created."""


OnWait = Callable[[str, float], object]
"""Called during a wait, at each look at the cluster, with what is missing and the seconds until the deadline."""


def _say_nothing(missing: str, left_s: float) -> None:
    """Waits in silence."""


@dataclass(frozen=True)
class RankBundles:
    """The bundles of one rank: all those of a placement group, or a part if several ranks share the group."""

    group: PlacementGroup
    indices: Sequence[int]
    """The workers', then the engine process's, if it has one."""
    worker: Bundle = field(default_factory=lambda: {"CPU": 1.0})
    """What each worker reserves of its bundle."""

    def nodes(self) -> list[str]:
        """The node id of each bundle. The group must have been created."""
        nodes = bundle_nodes(self.group)
        return [nodes[index] for index in self.indices]


def reserve(
    shape: EngineShape,
    *,
    names: Sequence[str] = (),
    avoid: Collection[str] = (),
    timeout_s: float = 60.0,
    asks_for_nodes: bool = False,
    is_wanted: Callable[[], bool] = lambda: True,
    standing: Mapping[str, int] = MappingProxyType({}),
    on_wait: OnWait = _say_nothing,
) -> list[PlacementGroup]:
    """Create one placement group per rank, and wait until all of them are created.

    While other jobs hold the resources, this waits. The caller removes the groups with
    `release()`. Otherwise Ray removes them when the Ray job ends.

    Args:
        names: the groups' names, one per rank; empty for groups without names.
        avoid: ids of nodes not to use.
        timeout_s: seconds to wait for the resources.
        asks_for_nodes: request the groups from Ray even if they don't fit now. An autoscaler sees the pending groups
            and adds nodes for them. Groups that are created earlier than others already hold their resources. With the
            strategy `strict`, nodes may end up with unequal numbers of ranks. In that case the groups are removed, and
            the ranks are placed again on the nodes that exist then.
        is_wanted: called while waiting. If it returns False, the reservation is cancelled.
        standing: see `plan_ranks`.
        on_wait: not called in the first second.

    Raises:
        PlacementShortage: at once if the ranks don't fit even the idle cluster and `asks_for_nodes` is False; after
            `timeout_s` if they still don't fit. Nothing stays reserved.
        ReservationCancelled: `is_wanted()` returned False. Nothing stays reserved.
    """
    waiting = _Waiting(shape, timeout_s, is_wanted, on_wait)
    while True:
        view = read_cluster().without(avoid)
        if not asks_for_nodes:
            plan_ranks(view, shape, of="total", standing=standing)
        plans = _plan_if_free(view, shape, standing)
        groups = _create(plans, names, waiting.left_s()) if plans is not None else None
        if groups is None and asks_for_nodes:
            groups = _ask(shape, names, avoid, waiting)
            asks_for_nodes = False
        if groups is not None:
            return groups
        waiting.step(view)


def release(groups: Sequence[PlacementGroup], timeout_s: float = _RELEASE_TIMEOUT_S) -> None:
    """Remove placement groups. Ray kills the actors and tasks that still run in them.

    Returns when Ray has removed the groups, or after `timeout_s` seconds, with a warning in the log.
    """
    settled_s = time.monotonic() + _SETTLE_TIMEOUT_S
    for group in groups:
        # 1 in 100 groups that are removed while they are being created never return their resources (Ray 2.60)
        if _state(group) in ("PENDING", "PREPARED"):
            _is_created(group, settled_s - time.monotonic())
        remove_placement_group(group)
    deadline_s = time.monotonic() + timeout_s
    left = list(groups)
    while left and time.monotonic() < deadline_s:
        left = [group for group in left if _state(group) != "REMOVED"]
        if left:
            time.sleep(0.005)
    if left:
        logger.warning("Ray hasn't removed %d of %d placement groups within %g s", len(left), len(groups), timeout_s)


@dataclass(frozen=True)
class GroupView:
    """A placement group that has been created, as Ray reports it."""

    name: str
    bundles: Sequence[tuple[str, Bundle]]
    """The node id and the resources of each bundle."""


def read_groups(prefix: str) -> list[GroupView]:
    """The created placement groups of the cluster whose names begin with `prefix`."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return [
        GroupView(
            group["name"],
            [(group["bundles_to_node_id"].get(index, ""), bundle) for index, bundle in group["bundles"].items()],
        )
        for group in table.values()
        if group["name"].startswith(prefix) and group["state"] == "CREATED"
    ]


def groups_named(prefix: str) -> list[PlacementGroup]:
    """All placement groups of the cluster whose names begin with `prefix`, except removed ones."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return [
        PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))
        for group_id, group in table.items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    ]


def validate_group(
    group: PlacementGroup,
    shape: EngineShape,
    timeout_s: float = 60.0,
    indices: Sequence[int] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
    on_wait: OnWait = _say_nothing,
) -> None:
    """Check that a placement group that the caller created can hold ranks of `shape`.

    Waits up to `timeout_s` seconds for Ray to create a pending group. A group may have more bundles and resources than
    the ranks need.

    Args:
        indices: the bundles that the ranks get: for each rank, one for each worker, then one for the engine process.
            None: one rank gets the first ones.
        is_wanted: called while waiting. If it returns False, the wait is over.
        on_wait: not called in the first second.

    Raises:
        PlacementGroupRemoved: the group was removed.
        InvalidPlacementGroup: the group has too few or too small bundles, or Ray doesn't create it in time.
        ReservationCancelled: `is_wanted()` returned False.
    """
    label = label_of(group)
    indices = range(len(shape.bundles)) if indices is None else indices
    _check_bundles(label, shape, indices, group.bundle_specs)
    if not _is_created_within(group, label, timeout_s, is_wanted, on_wait):
        check_not_removed(group)
        raise InvalidPlacementGroup(
            f"{label} is {_state(group)}, not CREATED (waited up to {timeout_s:g} s): "
            "pass a group that exists and fits the cluster"
        )


def _check_bundles(label: str, shape: EngineShape, indices: Sequence[int], found: Sequence[Bundle]) -> None:
    num_ranks = len(indices) // len(shape.bundles)
    if list(indices) == list(range(len(indices))) and len(found) < len(indices):
        ranks = "a rank needs" if num_ranks == 1 else f"{num_ranks} ranks need"
        engine = " and one for its engine" if shape.engine_bundle_index else ""
        raise InvalidPlacementGroup(
            f"{label} has {len(found)} bundles, but {ranks} at least {len(indices)}: "
            f"{'' if num_ranks == 1 else 'for each, '}{shape.world_size} for its workers{engine}"
        )
    for place, (index, needed) in enumerate(zip(indices, shape.bundles * num_ranks, strict=True)):
        if not 0 <= index < len(found):
            raise InvalidPlacementGroup(f"{label} has no bundle {index}: its bundles are 0 to {len(found) - 1}")
        user = "engine" if place % len(shape.bundles) == shape.world_size else "worker"
        for resource, amount in needed.items():
            if found[index].get(resource, 0.0) < amount:
                raise InvalidPlacementGroup(
                    f"bundle {index} of {label} has {resource} {found[index].get(resource, 0.0):g}, "
                    f"but the rank's {user} needs {amount:g}"
                )


def check_not_removed(group: PlacementGroup) -> None:
    """Raise PlacementGroupRemoved if a placement group that the caller created was removed."""
    if _state(group) == "REMOVED":
        raise PlacementGroupRemoved(
            f"{label_of(group)} is REMOVED, not CREATED: the program that made it has removed it, or has ended. Keep "
            "it until the engine has ended"
        )


def wait_until_free(
    bundles: RankBundles, shape: EngineShape, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Wait until nothing else uses what a rank of `shape` needs of its bundles in a created group.

    Args:
        is_wanted: called while waiting. If it returns False, the wait is over.

    Raises:
        InvalidPlacementGroup: after `timeout_s` seconds, actors or tasks still use a bundle.
        ReservationCancelled: `is_wanted()` returned False.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        free = free_in_group(bundles.group.id.hex())
        short = next(
            (
                (index, name, amount)
                for index, needed in zip(bundles.indices, shape.bundles, strict=True)
                for name, amount in needed.items()
                if free.get((index, name), 0.0) < amount
            ),
            None,
        )
        if short is None:
            return
        _check_wanted(is_wanted)
        if time.monotonic() > deadline_s:
            index, name, amount = short
            raise InvalidPlacementGroup(
                f"bundle {index} of {label_of(bundles.group)} has {name} "
                f"{free.get((index, name), 0.0):g} free, but a rank needs {amount:g} of it: other actors, tasks or "
                f"engines use the bundle (waited {timeout_s:g} s)"
            )
        time.sleep(_POLL_INTERVAL_S)


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """The node id of each bundle of a created placement group, in bundle order."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in sorted(nodes)]


def bundles_with(group: PlacementGroup, resource: str) -> list[int]:
    """The indices of a placement group's bundles that have some of a resource."""
    return [index for index, bundle in enumerate(group.bundle_specs) if bundle.get(resource, 0.0) > 0]


def label_of(group: PlacementGroup) -> str:
    """A placement group's name in messages."""
    return f"placement group {group.id.hex()[:12]}"


class _Waiting:
    """Waits for a reservation: keeps its deadline, and tells what is missing."""

    def __init__(
        self,
        shape: EngineShape,
        timeout_s: float,
        is_wanted: Callable[[], bool],
        on_wait: OnWait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shape = shape
        self._timeout_s = timeout_s
        self._is_wanted = is_wanted
        self._on_wait = on_wait
        self._clock = clock
        self._started_s = clock()

    def left_s(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self._started_s + self._timeout_s - self._clock())

    def step(self, view: ClusterView, standing: Mapping[str, Collection[str]] | None = None) -> None:
        """Sleep for one poll interval. Raises if the deadline has passed or the reservation was cancelled.

        Args:
            standing: while waiting for an autoscaler: the node ids of each created group, by the group's name.
        """
        _check_wanted(self._is_wanted)
        if self.left_s() <= 0:
            placed = "" if standing is None else f", with {len(standing)} of {self._shape.num_ranks} ranks placed"
            waited = f"Waited {self._timeout_s:g} s for these resources{placed}."
            raise PlacementShortage(describe_shortage(view, self._shape), waited)
        is_long = self._clock() >= self._started_s + _SILENT_S
        if is_long:
            shape = self._shape
            missing = describe_shortage(view, shape) if standing is None else describe_missing(view, shape, standing)
            self._on_wait(missing, self.left_s())
        time.sleep(min(_LONG_POLL_INTERVAL_S if is_long else _POLL_INTERVAL_S, self.left_s()))


def _plan_if_free(view: ClusterView, shape: EngineShape, standing: Mapping[str, int]) -> list[RankPlan] | None:
    try:
        return plan_ranks(view, shape, standing=standing)
    except PlacementShortage:
        return None


def _create(plans: Sequence[RankPlan], names: Sequence[str], timeout_s: float) -> list[PlacementGroup] | None:
    """Create the planned placement groups. If one isn't created in time, removes all of them and returns None."""
    groups: list[PlacementGroup] = []
    with ExitStack() as undo:
        undo.callback(release, groups)
        groups.extend(_create_one(plan, names[i] if names else "") for i, plan in enumerate(plans))
        deadline_s = time.monotonic() + min(max(timeout_s, _LEAST_ATTEMPT_S), _ATTEMPT_TIMEOUT_S)
        for group in groups:
            if not _is_created(group, deadline_s - time.monotonic()):
                return None
        undo.pop_all()
    return groups


def _ask(
    shape: EngineShape, names: Sequence[str], avoid: Collection[str], waiting: _Waiting
) -> list[PlacementGroup] | None:
    """Create placement groups on nodes that Ray chooses, and wait until all of them are created.

    If the strategy is `strict` and Ray put unequal numbers of ranks on the nodes, removes the groups and returns None.
    """
    # Ray itself avoids the nodes that it knows to be dead
    avoid = [node.node_id for node in read_cluster().nodes if node.alive and node.node_id in avoid]
    groups: list[PlacementGroup] = []
    with ExitStack() as undo:
        undo.callback(release, groups)
        parts = [part for part in shape.parts for _ in range(part.num_ranks)]
        for part, name in zip(parts, names or [""] * shape.num_ranks, strict=True):
            groups.append(_create_anywhere(part, avoid, name))
        while len(standing := _created_nodes(groups, names)) < len(groups):
            waiting.step(read_cluster().without(avoid), standing)
        movable = [nodes for part, nodes in zip(parts, standing.values(), strict=True) if part.num_there == 0]
        if shape.strategy == "strict" and not _are_even(movable or standing.values()):
            logger.warning(
                "the nodes hold unequal numbers of ranks, which strategy 'strict' forbids: placing the ranks again"
            )
            return None
        undo.pop_all()
    return groups


def _create_anywhere(shape: EngineShape, avoid: Collection[str], name: str) -> PlacementGroup:
    """Create a placement group on nodes that Ray chooses, as far as the shape leaves it a choice.

    `shape`: one of `EngineShape.parts`.
    """
    is_there = shape.node_id is not None and shape.num_there is None
    avoided = sorted({*avoid, shape.node_id} if shape.node_id is not None and not is_there else avoid)
    selector = {_NODE_ID_LABEL: f"!in({', '.join(avoided)})"} if avoided else {}
    if shape.node_id is not None and is_there:
        selector = {_NODE_ID_LABEL: shape.node_id}
    return placement_group(
        bundles=[dict(bundle) for bundle in shape.bundles],
        strategy="PACK" if shape.strategy == "span" else "STRICT_PACK",
        name=name,
        bundle_label_selector=[selector] * len(shape.bundles),
    )


def _created_nodes(groups: Sequence[PlacementGroup], names: Sequence[str]) -> dict[str, list[str]]:
    """The node ids of each group that has been created, by the group's name up to a colon, or by its id if it has no
    name."""
    labels = [name.partition(":")[0] for name in names] or [group.id.hex()[:12] for group in groups]
    return {
        label: bundle_nodes(group) for label, group in zip(labels, groups, strict=True) if _state(group) == "CREATED"
    }


def _are_even(nodes_of_ranks: Iterable[Sequence[str]]) -> bool:
    """Whether all nodes in use hold the same number of ranks."""
    return len(set(Counter(nodes[0] for nodes in nodes_of_ranks).values())) == 1


def _is_created_within(
    group: PlacementGroup, label: str, timeout_s: float, is_wanted: Callable[[], bool], on_wait: OnWait
) -> bool:
    """Wait up to `timeout_s` seconds for Ray to create the group. Returns whether it did."""
    started_s = time.monotonic()
    deadline_s = started_s + timeout_s
    while (state := _state(group)) not in ("CREATED", "REMOVED"):
        _check_wanted(is_wanted)
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return False
        if now_s >= started_s + _SILENT_S:
            on_wait(f"{label} is {state}", deadline_s - now_s)
        # not group.wait(), which can't be cancelled and takes whole seconds only
        time.sleep(min(_POLL_INTERVAL_S, deadline_s - now_s))
    return state == "CREATED"


def _is_created(group: PlacementGroup, timeout_s: float) -> bool:
    """Wait until a group is created. Also returns False if it is removed meanwhile."""
    try:
        return group.wait(max(0.0, timeout_s))
    except Exception:  # so Ray tells of a group that was removed
        if _state(group) != "REMOVED":
            raise
        return False


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise ReservationCancelled("the reservation was cancelled while it waited for resources")


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
