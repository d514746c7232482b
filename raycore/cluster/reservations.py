"""Reserves placement groups for an engine's ranks, replaces them when nodes fail, and removes them at the end.

Groups are also removed if the process that created the engine ends first: see `owner.py`. The manager starts the ranks
in the groups.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeGuard

from ray.util.placement_group import PlacementGroup

from placement.errors import InvalidPlacementGroup, PlacementGroupRemoved, PlacementShortage, ReservationCancelled
from placement.plan import EngineShape, evener_node
from placement.reserve import (
    OnWait,
    RankBundles,
    check_not_removed,
    groups_named,
    label_of,
    release,
    reserve,
    validate_group,
    wait_until_free,
)
from placement.topology import answers, read_cluster
from raycore.cluster.clock import Clock
from raycore.cluster.crowding import warn_if_crowded
from raycore.cluster.given import GivenDevices, GivenPlaces
from raycore.cluster.holders import describe_holders, group_name, prefix_of_groups
from raycore.cluster.owner import Reaper, start_reaper
from raycore.cluster.rank import Rank
from raycore.config import EngineConfig
from raycore.errors import InitializationError, InvalidConfig
from raycore.ray_api import kill, own_actor_id, own_resources
from raycore.recurring import Recurring
from raycore.system import threading

logger = logging.getLogger(__name__)

_REPLAN_S = 2.0
"""Timeout of one attempt to reserve a successor's group. The next attempt uses the nodes that are alive then."""

_POLL_INTERVAL_S = 0.5
"""The pause between the first two attempts to reserve a successor's group. The next ones grow, up to `_LONG_POLL_S`."""

_LONG_POLL_S = 2.0

_FIRST_REMINDER_S = 10.0
"""When a wait of a new engine, or of added ranks, is logged again. The intervals then grow."""

_GROW_S = 10.0
"""How long growth waits for resources. It waits at all because Ray shows released resources with a delay."""

Placement = dict[int, RankBundles | GivenDevices]
"""The bundles or devices of each rank, by dp_rank."""

OnShortage = Callable[[str, frozenset[str]], object]
"""Called again and again while there is no room for lost ranks: with what is missing, and the ids of usable nodes."""


class Reservations:
    """The placement groups of one engine's ranks. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        clock: Clock,
    ) -> None:
        """Create reservations without any groups."""
        self.crashed_nodes: set[str] = set()
        """Ids of nodes that don't answer, even if Ray still counts them as alive."""
        self._shape = EngineShape(num_ranks=0, world_size=0)
        self._engine_id = engine_id
        self._title = ""
        self._given = GivenPlaces()
        self._brought: Placement = {}
        """The bundles of the caller's groups, or the caller's devices, by the dp_rank that they are for."""
        self._patience_s = config.recovery.placement_timeout_s
        self._wait_for_nodes_s = config.parallel.wait_for_nodes_s
        self._is_ray_ours = False
        self._num_on_own_node = config.parallel.num_on_own_node
        self._own_node = ""
        self._reaper: Reaper | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._made: list[PlacementGroup] = []
        """The groups that this object created and hasn't removed."""
        self._was_interrupted = False
        """Whether there may be other groups that Ray created for this object."""
        self._cancelled = threading.Event()

    def open(
        self,
        shape: EngineShape,
        own_node: str,
        *,
        is_ray_ours: bool,
        given: GivenPlaces | None = None,
        title: str = "",
    ) -> None:
        """Prepare for reservations. This process must be connected to Ray.

        Args:
            shape: the resources that the ranks need.
            given: where the caller wants them. None: anywhere.
            own_node: the id of the node on which this process runs.
            is_ray_ours: whether raycore started this Ray. Such a Ray never gets more nodes, so `wait_for_nodes_s` is
                ignored.
            title: names the engine and its owner in the names of its groups, for others that lack room.
        """
        self._title = title
        if self._num_on_own_node is not None:
            shape = dataclasses.replace(shape, node_id=own_node, num_there=self._num_on_own_node)
        self._shape = shape
        self._own_node = own_node
        self._is_ray_ours = is_ray_ours
        if is_ray_ours:
            self._wait_for_nodes_s = 0.0
        self._given = given or GivenPlaces()

    def for_new_engine(self, is_wanted: Callable[[], bool] = lambda: True) -> Placement:
        """Reserve groups for all ranks of a new engine, or check the groups that the caller brought.

        Args:
            is_wanted: called while waiting. If it returns False, the reservation is cancelled.

        Raises:
            PlacementShortage: the cluster can't fit the ranks.
            InvalidConfig: the caller's groups can't fit the ranks.
            InitializationError: the reservation was cancelled.
        """
        if self._given.devices:
            self._brought = dict(enumerate(self._given.devices))
        elif self._given.groups is not None:
            self._brought = self._validated(self._given.groups, is_wanted)
        if self._brought:
            return self._brought.copy()
        if self._is_ray_ours:
            warn_if_crowded(self._shape, self._shape.num_ranks)
        return self._reserve(range(self._shape.num_ranks), self._wait_for_nodes_s or self._patience_s, is_wanted)

    def for_growth(self, dp_ranks: Sequence[int], standing: Iterable[Rank] = ()) -> Placement:
        """Reserve groups for additional ranks. A rank that had bundles of the caller's before gets them again.

        `standing`: the engine's other ranks.

        Raises:
            PlacementShortage: the cluster can't fit the additional ranks. Raised at once if even the idle cluster can't
                fit them, otherwise after a wait of 10 s for resources. If `wait_for_nodes_s` is set, raised after a
                wait of that time for nodes.
            InitializationError: the engine was shut down during the call.
        """
        standing = list(standing)
        if self._is_ray_ours:
            warn_if_crowded(self._shape, len(standing) + len(dp_ranks))
        brought = {dp_rank: self._brought[dp_rank] for dp_rank in dp_ranks if dp_rank in self._brought}
        try:
            with self._cancellable(list(brought)) as is_wanted:
                for bundles in brought.values():
                    if isinstance(bundles, RankBundles):
                        validate_group(bundles.group, self._shape, _GROW_S, bundles.indices, is_wanted, _logged())
                        wait_until_free(bundles, self._shape, _GROW_S, is_wanted)
        except InvalidPlacementGroup as error:
            raise PlacementShortage(str(error)) from error
        others = [dp_rank for dp_rank in dp_ranks if dp_rank not in brought]
        return brought | self._reserve(others, self._wait_for_nodes_s or _GROW_S, standing=_count(standing))

    def for_successors(
        self,
        ranks: Sequence[Rank],
        is_wanted: Callable[[], bool],
        standing: Sequence[Rank] = (),
        on_shortage: OnShortage = lambda missing, nodes: None,
    ) -> Placement:
        """The groups of the successors of these ranks: the ranks that replace them.

        A successor gets the group of the rank that it replaces, if all nodes of that group are alive and not draining.
        Otherwise this removes that group, reserves another one, and waits for it. It does the same if the strategy is
        `strict` and another node has so few ranks that a move there makes the numbers more even. A group that the
        caller brought is not replaced: this waits until Ray has moved it to other nodes.

        `standing`: the engine's other ranks.

        Raises:
            PlacementShortage: the cluster couldn't fit all successors in time.
            InitializationError: `is_wanted` returned False during a wait, or the engine was shut down.
        """
        deadline_s = self._clock.now_s() + max(self._patience_s, self._wait_for_nodes_s)

        pause_s = _POLL_INTERVAL_S

        def tell(missing: str, left_s: float = 0.0) -> None:
            missing = "\n".join([missing, *self._holders()])
            on_shortage(missing, frozenset(node.node_id for node in read_cluster().usable_nodes) - self.crashed_nodes)

        while True:
            try:
                kept = self._kept(ranks, is_wanted)
                if self._shape.strategy == "strict":
                    self._leave_crowded_nodes(ranks, kept, standing)
                homeless = [rank.dp_rank for rank in ranks if rank.dp_rank not in kept]
                others = _count([*standing, *(rank for rank in ranks if rank.dp_rank in kept)])
                return kept | self._reserve(homeless, self._wait_for_nodes_s or _REPLAN_S, is_wanted, others, tell)
            except PlacementShortage as error:
                tell(error.table)
                is_late = self._clock.now_s() > deadline_s
                if is_late or not is_wanted() or self._clock.wait(self._cancelled, pause_s):
                    raise
                pause_s = min(2 * pause_s, _LONG_POLL_S)

    def find_crashed(self, node_ids: Iterable[str]) -> set[str]:
        """The nodes among `node_ids` that have left the cluster or don't answer. Never includes this process's node."""
        suspects = dict.fromkeys(node_id for node_id in node_ids if node_id != self._own_node)
        if suspects:
            nodes = {node.node_id: node for node in read_cluster().nodes}
            self.crashed_nodes |= {
                node_id for node_id in suspects if node_id not in nodes or not answers(nodes[node_id])
            }
        return suspects.keys() & self.crashed_nodes

    def release(self, places: Iterable[RankBundles | GivenDevices]) -> None:
        """Remove those groups of `places` that this object created, and kill the actors that still run in them."""
        self._remove([each.group for each in places if isinstance(each, RankBundles)])

    def _remove(self, given: list[PlacementGroup]) -> None:
        with self._lock:
            leaving = [group for group in self._made if group in given]
            self._made = [group for group in self._made if group not in given]
        release(leaving)

    def cancel(self) -> None:
        """Cancel reservations in progress, and refuse further ones."""
        self._cancelled.set()

    def close(self) -> None:
        """Remove every group that this object created. Idempotent. Needs a connection to Ray."""
        self.cancel()
        if self._was_interrupted:
            found = groups_named(f"{prefix_of_groups(self._engine_id)}dp")
            with self._lock:
                self._made += [group for group in found if group not in self._made]
        self._remove(list(self._made))
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            kill(reaper)

    def _leave_crowded_nodes(self, ranks: Sequence[Rank], kept: Placement, standing: Sequence[Rank]) -> None:
        """Remove the groups of ranks that should move to a node with fewer ranks, such as one that has just joined, or
        answers again."""
        self._forgive()
        for rank in ranks:
            if not self._is_made(rank.bundles) or rank.dp_rank not in kept:
                continue
            counts = _count([*standing, *(other for other in ranks if other.dp_rank in kept)])
            view = read_cluster().without(self.crashed_nodes)
            if evener_node(view, self._shape, rank.nodes[0], counts) is not None:
                self.release([rank.bundles])
                rank.bundles = None
                del kept[rank.dp_rank]

    def _forgive(self) -> None:
        """Forget that nodes didn't answer, if they do now."""
        if self.crashed_nodes:
            nodes = [node for node in read_cluster().nodes if node.alive and node.node_id in self.crashed_nodes]
            self.crashed_nodes -= {node.node_id for node in nodes if answers(node)}

    def _shape_of(self, dp_ranks: Sequence[int]) -> EngineShape:
        """The shape of some of the ranks, in rising order."""
        below = self._num_on_own_node
        num_there = None if below is None else sum(dp_rank < below for dp_rank in dp_ranks)
        return dataclasses.replace(self._shape, num_ranks=len(dp_ranks), num_there=num_there)

    def _reserve(
        self,
        dp_ranks: Sequence[int],
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        standing: Mapping[str, int] = MappingProxyType({}),
        on_wait: OnWait | None = None,
    ) -> Placement:
        """Create groups. `on_wait`: None logs what a wait is for."""
        if not dp_ranks:
            return {}
        dp_ranks = sorted(dp_ranks)
        self._forgive()
        with self._lock:
            if self._reaper is None and not self._cancelled.is_set():
                prefix = prefix_of_groups(self._engine_id)
                self._reaper = start_reaper(f"{prefix}reaper", f"{prefix}dp")
        try:
            with self._cancellable(dp_ranks, is_wanted) as is_still_wanted:
                groups = reserve(
                    self._shape_of(dp_ranks),
                    names=[group_name(self._engine_id, dp_rank, self._title) for dp_rank in dp_ranks],
                    avoid=self.crashed_nodes,
                    timeout_s=timeout_s,
                    asks_for_nodes=self._wait_for_nodes_s > 0,
                    is_wanted=is_still_wanted,
                    standing=standing,
                    on_wait=on_wait or _logged(self._holders),
                )
            with self._lock:
                self._made += groups
        except PlacementShortage as error:
            # without remarks, there was no wait: not even the idle cluster has room
            holders = self._holders() if error.remarks else []
            raise PlacementShortage(error.table, *error.remarks, *holders, *self._advice()) from None
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt, maybe when Ray had just created a group
                self._was_interrupted = True
            raise
        if self._cancelled.is_set():
            self._remove(groups)
            raise InitializationError("the engine was shut down")
        whole = range(len(self._shape.bundles))
        return {dp_rank: self._part_of(group, whole) for dp_rank, group in zip(dp_ranks, groups, strict=True)}

    def _part_of(self, group: PlacementGroup, indices: Sequence[int]) -> RankBundles:
        return RankBundles(group, indices, self._shape.worker_bundle)

    def _is_made(self, bundles: RankBundles | GivenDevices | None) -> TypeGuard[RankBundles]:
        """Whether the bundles are of a group that this object created."""
        return isinstance(bundles, RankBundles) and bundles.group in self._made

    @contextmanager
    def _cancellable(
        self, dp_ranks: Sequence[int], is_wanted: Callable[[], bool] = lambda: True
    ) -> Generator[Callable[[], bool]]:
        """What waits for the placement of these ranks. Yields whether it should go on, also in view of `cancel()`."""
        try:
            yield lambda: is_wanted() and not self._cancelled.is_set()
        except ReservationCancelled as error:
            raise InitializationError(
                f"dp_ranks {list(dp_ranks)} weren't placed, because they were removed or the engine was shut down"
            ) from error

    def _holders(self) -> list[str]:
        """Which other engines hold what the ranks need."""
        return describe_holders({name for bundle in self._shape.bundles for name in bundle}, self._engine_id)

    def _advice(self) -> Iterator[str]:
        """What to do about a shortage, apart from what `placement` knows."""
        needed = {name for bundle in self._shape.bundles for name in bundle}
        held = {name: amount for name, amount in own_resources().items() if name in needed}
        if held:
            kind = "task" if own_actor_id() is None else "actor"
            amounts = " and ".join(f"{name} {amount:g}" for name, amount in held.items())
            zeros = " and ".join(f"num_{name.lower()}s=0" for name in held)
            yield (
                f"The {kind} that starts this engine holds {amounts} itself, which the ranks can't use. It needs none "
                f"of that: declare it with {zeros} (in Ray Data: map_batches(..., {zeros})), or pass placement_groups "
                "with bundles for the ranks."
            )
        if not self._is_ray_ours and self._wait_for_nodes_s == 0:
            yield "If an autoscaler can add nodes, set wait_for_nodes_s (--wait-for-nodes) to wait for them."

    def _validated(self, groups: Sequence[PlacementGroup], is_wanted: Callable[[], bool]) -> Placement:
        if len(groups) != self._shape.num_ranks:
            raise InvalidConfig(
                f"{len(groups)} placement_groups for data_parallel_size={self._shape.num_ranks}: give one for each rank"
            )
        timeout_s = self._wait_for_nodes_s or self._patience_s
        placement = self._parts_of(groups)
        taken: dict[PlacementGroup, list[int]] = {}
        for dp_rank, bundles in placement.items():
            indices = taken.setdefault(bundles.group, [])
            twice = set(indices) & set(bundles.indices)
            if twice:
                raise InvalidConfig(
                    f"bundle {min(twice)} of {label_of(bundles.group)} is given to dp_rank {dp_rank} and to another "
                    "one: each worker needs a bundle of its own (placement_bundle_indices)"
                )
            indices += bundles.indices
        try:
            with self._cancellable(list(placement), is_wanted) as is_still_wanted:
                for group, indices in taken.items():
                    validate_group(group, self._shape, timeout_s, indices, is_still_wanted, _logged())
                for bundles in placement.values():
                    wait_until_free(bundles, self._shape, timeout_s, is_still_wanted)
        except InvalidPlacementGroup as error:
            raise InvalidConfig(f"placement_groups: {error}") from error
        return {**placement}

    def _parts_of(self, groups: Sequence[PlacementGroup]) -> dict[int, RankBundles]:
        """The bundles of each rank in the caller's groups."""
        given, size, num_placed = self._given.indices, len(self._shape.bundles), Counter[PlacementGroup]()
        parts: dict[int, RankBundles] = {}
        for dp_rank, group in enumerate(groups):
            start = num_placed[group] * size
            num_placed[group] += 1
            parts[dp_rank] = self._part_of(group, range(start, start + size) if given is None else given[dp_rank])
        return parts

    def _kept(self, ranks: Sequence[Rank], is_wanted: Callable[[], bool]) -> Placement:
        """The ranks' bundles whose nodes are all alive and not draining. Removes the groups of others, except the
        caller's.

        Raises PlacementGroupRemoved if the caller's group is gone.
        """
        usable = {node.node_id for node in read_cluster().usable_nodes}
        usable -= self.find_crashed(node for rank in ranks for node in rank.nodes)
        kept: Placement = {}
        for rank in ranks:
            bundles, is_usable = rank.bundles, usable.issuperset(rank.nodes)
            if bundles is None:
                continue
            if self._is_made(bundles):
                if not is_usable:
                    self.release([bundles])
                    rank.bundles = None
                    continue
            elif isinstance(bundles, RankBundles):
                check_not_removed(bundles.group)
                if not is_usable:
                    self._wait_until_moved(rank.dp_rank, bundles, is_wanted)
            kept[rank.dp_rank] = bundles
        return kept

    def _wait_until_moved(self, dp_rank: int, bundles: RankBundles, is_wanted: Callable[[], bool]) -> None:
        """raycore can't replace the caller's group, but Ray may move the group to other nodes."""
        try:
            with self._cancellable([dp_rank], is_wanted) as is_still_wanted:
                validate_group(bundles.group, self._shape, _REPLAN_S, bundles.indices, is_still_wanted)
        except PlacementGroupRemoved:
            raise
        except InvalidPlacementGroup as error:
            raise PlacementShortage(str(error)) from error


def _logged(remarks: Callable[[], Iterable[str]] = list) -> OnWait:
    """Logs what a wait is for, with remarks: when it begins, when that changes, and otherwise rarely."""
    waits = Recurring(_FIRST_REMINDER_S)

    def log(missing: str, left_s: float) -> None:
        if waits.is_due(missing):
            logger.warning("waiting up to %.0f s more: %s", left_s, "\n".join([missing, *remarks()]))

    return log


def _count(ranks: Iterable[Rank]) -> Counter[str]:
    """The number of ranks whose first worker is on a node, by node id."""
    return Counter(rank.nodes[0] for rank in ranks)
