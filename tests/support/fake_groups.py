"""Placement groups without Ray, on nodes that tests add, fill and take away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from fake_clock import FakeClock

from placement.errors import InvalidPlacementGroup, PlacementGroupRemoved, PlacementShortage, ReservationCancelled
from placement.plan import EngineShape, plan_ranks
from placement.reserve import GroupView
from placement.topology import ClusterView, NodeView


@dataclass(eq=False)
class FakeGroup:
    """In the place of a `PlacementGroup`."""

    name: str
    nodes: list[str]
    """The node of each bundle."""


def has(number: int) -> dict[str, float]:
    """The resources of a node."""
    return {"CPU": number, "GPU": number}


class FakeGroups:
    """In the place of what `Reservations` uses of `placement`."""

    def __init__(self, clock: FakeClock, nodes: Mapping[str, int]) -> None:
        """`nodes`: the number of CPUs, and of GPUs, of each node."""
        self.clock = clock
        self.nodes = dict(nodes)
        self.standing: list[FakeGroup] = []
        """The groups that haven't been removed."""
        self.draining: set[str] = set()
        self.silent: set[str] = set()
        """Nodes that don't answer, though Ray takes them for alive."""
        self.invalid: set[str] = set()
        """The names of groups whose bundles Ray has lost."""
        self.removed: set[str] = set()
        """The names of groups that the caller has removed."""
        self.asked_for_nodes = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the functions of `placement`, for one test."""
        ours = ("reserve", "release", "validate_group", "check_not_removed", "wait_until_free", "read_cluster")
        for name in (*ours, "answers", "groups_named", "label_of"):
            monkeypatch.setattr(f"raycore.cluster.reservations.{name}", getattr(self, name))
        monkeypatch.setattr("raycore.cluster.reservations.start_reaper", lambda name, prefix: None)
        monkeypatch.setattr("raycore.cluster.reservations.own_resources", dict)
        monkeypatch.setattr("raycore.cluster.manager.read_cluster", self.read_cluster)
        monkeypatch.setattr("raycore.cluster.holders.read_groups", self.read_groups)
        monkeypatch.setattr("placement.reserve.bundle_nodes", lambda group: group.nodes)

    def names(self) -> dict[str, str]:
        """The node of each standing group's first bundle, by the end of the group's name."""
        return {group.name.partition(":")[0].rpartition("_")[2]: group.nodes[0] for group in self.standing}

    def make(self, *nodes: str, name: str = "brought") -> FakeGroup:
        """A group that the caller brings."""
        self.standing.append(FakeGroup(name, list(nodes)))
        return self.standing[-1]

    def reserve(
        self,
        shape: EngineShape,
        *,
        names: Sequence[str],
        avoid: Collection[str],
        timeout_s: float,
        asks_for_nodes: bool,
        is_wanted: Callable[[], bool],
        standing: Mapping[str, int],
        on_wait: Callable[[str, float], object],
    ) -> list[FakeGroup]:
        self.asked_for_nodes = asks_for_nodes
        until_s = self.clock.now_s() + timeout_s
        while True:
            try:
                plans = plan_ranks(self.read_cluster().without(avoid), shape, standing=standing)
                break
            except PlacementShortage as shortage:
                if not is_wanted():
                    raise ReservationCancelled("cancelled") from None
                if self.clock.now_s() >= until_s:
                    raise PlacementShortage(shortage.table, f"Waited {timeout_s:g} s") from None
                on_wait(shortage.table, until_s - self.clock.now_s())
            self.clock.let_pass(0.25)  # as often as the function itself, once it has waited for a second
        made = [FakeGroup(name, list(plan.node_ids)) for name, plan in zip(names, plans, strict=True)]
        self.standing += made
        return made

    def groups_named(self, prefix: str) -> list[FakeGroup]:
        return [group for group in self.standing if group.name.startswith(prefix)]

    def release(self, groups: Sequence[FakeGroup]) -> None:
        for group in groups:
            self.standing.remove(group)

    def validate_group(
        self,
        group: FakeGroup,
        shape: EngineShape,
        timeout_s: float,
        indices: Sequence[int],
        is_wanted: Callable[[], bool],
        on_wait: Callable[[str, float], object] = lambda missing, left_s: None,
    ) -> None:
        if not self.clock.wait_until(lambda: group.name not in self.invalid, timeout_s):
            raise InvalidPlacementGroup(f"{group.name} is RESCHEDULING")

    def check_not_removed(self, group: FakeGroup) -> None:
        if group.name in self.removed:
            raise PlacementGroupRemoved(f"{group.name} is REMOVED")

    def label_of(self, group: FakeGroup) -> str:
        return f"placement group {group.name}"

    def wait_until_free(
        self, bundles: Any, shape: EngineShape, timeout_s: float, is_wanted: Callable[[], bool]
    ) -> None:
        pass

    def read_cluster(self) -> ClusterView:
        used = Counter(node for group in self.standing for node in group.nodes)
        return ClusterView(
            tuple(
                NodeView(name, name, has(number), has(number - used[name]), draining=name in self.draining)
                for name, number in self.nodes.items()
            )
        )

    def read_groups(self, prefix: str) -> list[GroupView]:
        shown = [group for group in self.standing if group.name.startswith(prefix)]
        return [GroupView(group.name, [(node, has(1)) for node in group.nodes]) for group in shown]

    def answers(self, node: NodeView) -> bool:
        return node.node_id not in self.silent
