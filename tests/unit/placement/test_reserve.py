"""Waiting for a placement group of the caller's, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from placement import reserve
from placement.errors import InvalidPlacementGroup, PlacementShortage, ReservationCancelled
from placement.plan import EngineShape
from placement.reserve import RankBundles, validate_group, wait_until_free
from placement.topology import ClusterView, NodeView

SHAPE = EngineShape(num_ranks=1, world_size=1)


class Clock:
    """Its time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reserve, "time", clock)
    return clock


@pytest.fixture
def group() -> PlacementGroup:
    return PlacementGroup(PlacementGroupID(b"\1" * 18), bundle_cache=[dict(bundle) for bundle in SHAPE.bundles])


def in_state(monkeypatch, clock: Clock, states: dict[float, str]) -> None:
    """Let a group be in these states, each from a time in seconds on."""

    def state(group: Any) -> str:
        return [name for start_s, name in states.items() if start_s <= clock.now_s][-1]

    monkeypatch.setattr(reserve, "_state", state)


def test_the_wait_for_a_pending_group_ends_when_the_caller_cancels(monkeypatch, clock, group):
    in_state(monkeypatch, clock, {0: "PENDING"})
    with pytest.raises(ReservationCancelled):
        validate_group(group, SHAPE, timeout_s=60, is_wanted=lambda: clock.now_s < 3)
    assert clock.now_s < 3.1


def test_a_placement_group_that_is_not_created_in_time_is_refused(monkeypatch, clock, group):
    in_state(monkeypatch, clock, {0: "PENDING", 12: "RESCHEDULING"})
    told: dict[str, float] = {}
    with pytest.raises(InvalidPlacementGroup, match="is RESCHEDULING, not CREATED"):
        validate_group(group, SHAPE, timeout_s=25, on_wait=lambda missing, left_s: told.setdefault(missing, left_s))
    assert clock.now_s == pytest.approx(25)
    pending, rescheduling = (f"placement group 010101010101 is {state}" for state in ("PENDING", "RESCHEDULING"))
    assert told == {pending: pytest.approx(24, abs=0.1), rescheduling: pytest.approx(13, abs=0.1)}


@pytest.mark.parametrize("end", ["CREATED", "REMOVED"])
def test_the_wait_for_a_group_ends_when_it_is_created_or_removed(monkeypatch, clock, group, end):
    in_state(monkeypatch, clock, {0: "PENDING", 5: end})
    if end == "CREATED":
        validate_group(group, SHAPE)
    else:
        with pytest.raises(InvalidPlacementGroup, match="is REMOVED"):
            validate_group(group, SHAPE)
    assert clock.now_s < 5.1


@pytest.mark.parametrize("away", ["at the look", "at the request"])
def test_resources_that_are_free_are_no_shortage_though_rays_control_store_was_away(monkeypatch, clock, group, away):
    def look() -> ClusterView:
        clock.sleep(30.0 if away == "at the look" else 0.0)
        return ClusterView((NodeView("n1", "10.0.0.1", {"CPU": 8.0}, {"CPU": 8.0}),))

    def create(**_: Any) -> PlacementGroup:
        clock.sleep(30.0 if away == "at the request" else 0.0)
        return group

    monkeypatch.setattr(reserve, "read_cluster", look)
    monkeypatch.setattr(reserve, "placement_group", create)
    monkeypatch.setattr(reserve, "remove_placement_group", lambda group: None)
    in_state(monkeypatch, clock, {0: "CREATED"})
    monkeypatch.setattr(PlacementGroup, "wait", lambda group, timeout_s: timeout_s >= 1)
    assert reserve.reserve(SHAPE, timeout_s=10.0) == [group]


def test_ranks_that_the_idle_cluster_has_no_room_for_are_a_shortage_without_a_wait(monkeypatch, clock):
    monkeypatch.setattr(
        reserve, "read_cluster", lambda: ClusterView((NodeView("n1", "10.0.0.1", {"CPU": 8.0}, {"CPU": 2.0}),))
    )
    with pytest.raises(PlacementShortage):
        reserve.reserve(EngineShape(num_ranks=9, world_size=1), is_wanted=lambda: False)
    with pytest.raises(ReservationCancelled):  # who waits is asked
        reserve.reserve(EngineShape(num_ranks=2, world_size=1), is_wanted=lambda: False)


def test_the_wait_for_bundles_in_use_ends_when_the_caller_cancels_or_at_the_deadline(monkeypatch, clock, group):
    monkeypatch.setattr(reserve, "free_in_group", lambda group_id: {})
    bundles = RankBundles(group, range(2))
    with pytest.raises(ReservationCancelled):
        wait_until_free(bundles, SHAPE, 60, lambda: clock.now_s < 3)
    assert clock.now_s < 3.1
    with pytest.raises(InvalidPlacementGroup, match="waited 60 s"):
        wait_until_free(bundles, SHAPE, 60)


class Removed:
    """A group that somebody removes while Ray creates it."""

    def wait(self, timeout_seconds: float) -> bool:
        raise Exception("Placement group PlacementGroupID(01) does not exist.")


def test_a_group_that_is_removed_while_it_is_created_has_no_effect_on_its_release(monkeypatch, clock):
    states, removed = iter(["PENDING", "REMOVED", "REMOVED"]), []
    monkeypatch.setattr(reserve, "_state", lambda group: next(states))
    monkeypatch.setattr(reserve, "remove_placement_group", removed.append)
    group: Any = Removed()
    reserve.release([group])
    assert removed == [group]


def test_a_rank_whose_group_is_removed_while_it_is_created_gets_another(monkeypatch, clock):
    monkeypatch.setattr(reserve, "_state", lambda group: "REMOVED")
    monkeypatch.setattr(reserve, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(reserve, "_create_one", lambda plan, name: Removed())
    plan: Any = None
    assert reserve._create([plan], [], 5.0) is None


def test_a_group_is_removed_if_the_next_one_can_not_be_created(monkeypatch, clock, group):
    created, removed = [group], []
    monkeypatch.setattr(reserve, "_create_one", lambda plan, name: created.pop())
    monkeypatch.setattr(reserve, "_state", lambda group: "REMOVED")
    monkeypatch.setattr(reserve, "remove_placement_group", removed.append)
    plan: Any = None
    with pytest.raises(IndexError):
        reserve._create([plan] * 2, [], 5.0)
    assert removed == [group]


def test_another_error_of_a_wait_for_a_group_is_raised(monkeypatch, clock):
    monkeypatch.setattr(reserve, "_state", lambda group: "PENDING")
    monkeypatch.setattr(reserve, "remove_placement_group", lambda group: None)
    group: Any = Removed()
    with pytest.raises(Exception, match="does not exist"):
        reserve.release([group])
