"""Ranks get groups on nodes that work, keep them while they can, and give back what raycore has made."""

from __future__ import annotations

from typing import Any

import pytest
from configs import make_config
from fake_clock import FakeClock
from fake_groups import FakeGroups
from fake_runtime import DRIVER, FakeRef, FakeRuntime

from placement.errors import PlacementGroupRemoved, PlacementShortage
from placement.plan import EngineShape
from raycore.cluster.given import GivenDevices, GivenPlaces
from raycore.cluster.rank import Rank
from raycore.cluster.reservations import Placement, Reservations
from raycore.config import EngineConfig, ParallelConfig, RecoveryConfig
from raycore.errors import InitializationError, InvalidConfig


class PlacedEngine:
    """Reservations on fake nodes, and the ranks that were placed."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        nodes: dict[str, int],
        num_ranks: int = 2,
        strategy: Any = "fill",
        brought: Any = None,
        indices: Any = None,
        given: Any = None,
        is_ray_ours: bool = False,
        wait_for_nodes_s: float = 0.0,
        num_on_own_node: int | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.groups = FakeGroups(self.clock, nodes)
        self.groups.install(monkeypatch)
        places = {"wait_for_nodes_s": wait_for_nodes_s, "num_on_own_node": num_on_own_node}
        parallel = ParallelConfig(1, num_ranks, **places)
        recovery = RecoveryConfig(placement_timeout_s=60.0)
        base = make_config()
        config = EngineConfig(base.model, base.cache, base.scheduler, parallel, base.executor, recovery=recovery)
        made = {name: self.groups.make(*nodes, name=name) for name, *nodes in dict.fromkeys(brought or ())}
        given = given or GivenPlaces(None if brought is None else [made[name] for name, *_ in brought], indices)
        self.reservations = Reservations(config, "ab", self.clock)
        self.shape = EngineShape(num_ranks, world_size=1, engine_cpus=0.0, strategy=strategy)
        self.reservations.open(self.shape, DRIVER, is_ray_ours=is_ray_ours, given=given)
        self.ranks: dict[int, Rank] = {}

    def place(self, placement: Placement | None = None) -> dict[int, str]:
        """Start ranks. Returns the node of each rank."""
        actor: Any = FakeRuntime().create_standby("rank", make_config(), DRIVER)
        ref: Any = FakeRef()
        for dp_rank, bundles in (self.reservations.for_new_engine() if placement is None else placement).items():
            self.ranks[dp_rank] = Rank(dp_rank, bundles, bundles.nodes(), actor, ref)
        return {dp_rank: rank.nodes[0] for dp_rank, rank in sorted(self.ranks.items())}

    def replace(self, *dp_ranks: int, is_wanted: Any = lambda: True) -> dict[int, str]:
        """Replace ranks. Returns the node of each rank."""
        old = [self.ranks[dp_rank] for dp_rank in dp_ranks]
        others = [rank for rank in self.ranks.values() if rank not in old]
        return self.place(self.reservations.for_successors(old, is_wanted, others))


@pytest.fixture
def make(monkeypatch):
    return lambda *args, **options: PlacedEngine(monkeypatch, *args, **options)


# ---- new engines and growth


def test_an_interrupt_while_groups_are_created_leaves_none(make, monkeypatch):
    engine = make({DRIVER: 2}, num_ranks=1)
    reserve = engine.groups.reserve

    def interrupted(*args: Any, **kwargs: Any) -> None:
        reserve(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr("raycore.cluster.reservations.reserve", interrupted)
    theirs = engine.groups.make(DRIVER, name="raycore_other_dp0")
    with pytest.raises(KeyboardInterrupt):
        engine.place()
    assert len(engine.groups.standing) == 2
    engine.reservations.close()
    assert engine.groups.standing == [theirs]


def test_each_rank_has_a_placement_group_with_its_name(make):
    engine = make({DRIVER: 1, "other": 1})
    assert engine.place() == {0: DRIVER, 1: "other"}
    assert [group.name for group in engine.groups.standing] == ["raycore_ab_dp0", "raycore_ab_dp1"]
    engine.reservations.close()
    assert engine.groups.standing == []


def test_a_new_engine_waits_for_resources(make):
    engine = make({DRIVER: 1})
    with pytest.raises(PlacementShortage):
        engine.place()
    assert engine.clock.now_s() == pytest.approx(60.0, abs=0.1)
    assert not engine.groups.asked_for_nodes


@pytest.mark.parametrize(("is_ray_ours", "waited_s"), [(False, 600.0), (True, 60.0)])
def test_reservations_wait_for_nodes_only_if_an_autoscaler_may_add_some(make, is_ray_ours, waited_s):
    engine = make({DRIVER: 1}, wait_for_nodes_s=600.0, is_ray_ours=is_ray_ours)
    with pytest.raises(PlacementShortage):
        engine.place()
    assert engine.clock.now_s() == pytest.approx(waited_s, abs=0.1)
    assert engine.groups.asked_for_nodes is not is_ray_ours


@pytest.mark.parametrize(
    ("options", "is_told"), [({}, True), ({"is_ray_ours": True}, False), ({"wait_for_nodes_s": 1.0}, False)]
)
def test_a_shortage_names_wait_for_nodes_s_only_if_the_option_may_help(make, options, is_told):
    engine = make({DRIVER: 1}, **options)
    with pytest.raises(PlacementShortage) as shortage:
        engine.place()
    assert ("set wait_for_nodes_s" in str(shortage.value)) is is_told


@pytest.mark.parametrize(("own", "is_named"), [({DRIVER: 1}, True), ({}, False)], ids=["waited", "never fits"])
def test_a_shortage_names_the_engines_that_hold_resources_if_it_would_end_with_them(make, monkeypatch, own, is_named):
    engine = make({DRIVER: 1, "other": 1}, num_ranks=1)
    engine.groups.make(*(own or {DRIVER: 1}), "other", name="raycore_cd_dp0: engine chat of driver (pid 7)")
    if not own:
        monkeypatch.setattr("raycore.cluster.reservations.reserve", at_once)
    with pytest.raises(PlacementShortage) as shortage:
        engine.place()
    holder = "  engine chat of driver (pid 7): CPU 1 on driver, CPU 1 on other"
    assert (holder in str(shortage.value).splitlines()) is is_named


def at_once(*_: Any, **__: Any) -> Any:
    """What `reserve` does if not even the idle cluster has room."""
    raise PlacementShortage("1 rank of 9 workers doesn't fit")


def test_a_shortage_names_the_resources_that_the_starting_actor_holds(make, monkeypatch):
    engine = make({DRIVER: 1})
    monkeypatch.setattr("raycore.cluster.reservations.own_resources", lambda: {"CPU": 2.0, "disk": 1.0})
    monkeypatch.setattr("raycore.cluster.reservations.own_actor_id", lambda: "12ab")
    with pytest.raises(PlacementShortage, match="The actor that starts this engine holds CPU 2 itself"):
        engine.place()


def test_added_ranks_wait_a_moment_for_resources(make):
    engine = make({DRIVER: 2})
    engine.place()
    with pytest.raises(PlacementShortage):
        engine.reservations.for_growth([2], engine.ranks.values())
    assert engine.clock.now_s() == pytest.approx(10.0, abs=0.1)
    engine.groups.nodes["other"] = 1
    assert engine.place(engine.reservations.for_growth([2], engine.ranks.values())) == {
        0: DRIVER,
        1: DRIVER,
        2: "other",
    }


def test_added_ranks_under_strict_are_spread_with_the_ranks_in_place(make):
    engine = make({DRIVER: 4, "other": 4}, strategy="strict")
    engine.place()
    engine.place(engine.reservations.for_growth([2, 3], engine.ranks.values()))
    assert sorted(engine.groups.names().values()) == [DRIVER, DRIVER, "other", "other"]


def test_as_many_ranks_are_on_the_programs_node_as_the_option_says_also_later(make):
    engine = make({DRIVER: 9, "other": 2, "third": 2}, num_ranks=3, num_on_own_node=1)
    assert engine.place() == {0: DRIVER, 1: "other", 2: "other"}
    assert engine.place(engine.reservations.for_growth([3], engine.ranks.values()))[3] == "third"
    engine.groups.draining.add("other")
    with pytest.raises(PlacementShortage):
        engine.replace(0, 1, 2)
    engine.groups.nodes["fourth"] = 1
    assert engine.replace(2, 1, 0) == {0: DRIVER, 1: "third", 2: "fourth", 3: "third"}


@pytest.mark.parametrize("is_ray_ours", [True, False])
def test_more_ranks_than_cores_are_told_only_on_a_ray_of_raycores(make, monkeypatch, is_ray_ours):
    told = []
    monkeypatch.setattr("raycore.cluster.reservations.warn_if_crowded", lambda shape, num_ranks: told.append(num_ranks))
    engine = make({DRIVER: 9}, is_ray_ours=is_ray_ours)
    engine.place()
    engine.reservations.for_growth([2, 3], engine.ranks.values())
    assert told == ([2, 4] if is_ray_ours else [])


# ---- successors


def test_a_successor_keeps_its_placement_group(make):
    engine = make({DRIVER: 1, "other": 1, "third": 1})
    engine.place()
    before = list(engine.groups.standing)
    assert engine.replace(1) == {0: DRIVER, 1: "other"}
    assert engine.groups.standing == before


@pytest.mark.parametrize("trouble", ["draining", "silent"])
def test_a_successor_moves_from_a_draining_node(make, trouble):
    engine = make({DRIVER: 1, "other": 1, "third": 1})
    engine.place()
    getattr(engine.groups, trouble).add("other")
    assert engine.replace(1) == {0: DRIVER, 1: "third"}
    assert engine.groups.names() == {"dp0": DRIVER, "dp1": "third"}, "the old group has been removed"


def test_a_successor_moves_from_a_dead_node(make):
    engine = make({DRIVER: 1, "other": 1, "third": 1})
    engine.place()
    del engine.groups.nodes["other"]
    assert engine.replace(1) == {0: DRIVER, 1: "third"}


def test_the_drivers_node_is_never_taken_for_crashed(make):
    engine = make({DRIVER: 1, "other": 1})
    engine.groups.silent = {DRIVER, "other"}
    assert engine.reservations.find_crashed([DRIVER, "other", "gone"]) == {"other", "gone"}


def test_a_node_that_answers_again_is_used_again(make):
    engine = make({DRIVER: 1, "other": 1})
    engine.place()
    engine.groups.silent = {"other"}
    engine.clock.start_thread("test", lambda: (engine.clock.let_pass(5.0), engine.groups.silent.clear()))
    assert engine.replace(1) == {0: DRIVER, 1: "other"}
    assert engine.clock.now_s() == pytest.approx(5.0, abs=3.0)
    assert engine.reservations.crashed_nodes == set()


def test_a_successor_waits_for_room_until_the_deadline(make):
    engine = make({DRIVER: 1, "other": 1})
    engine.place()
    del engine.groups.nodes["other"]
    with pytest.raises(PlacementShortage):
        engine.replace(1)
    assert 60.0 < engine.clock.now_s() < 66.0


@pytest.mark.parametrize("how", ["unwanted", "cancelled"])
def test_a_wait_for_a_successor_can_be_cancelled(make, how):
    engine = make({DRIVER: 1, "other": 1})
    engine.place()
    del engine.groups.nodes["other"]
    wanted = [True]
    end = wanted.clear if how == "unwanted" else engine.reservations.cancel
    engine.clock.start_thread("test", lambda: (engine.clock.let_pass(5.0), end()))
    with pytest.raises((InitializationError, PlacementShortage)):
        engine.replace(1, is_wanted=lambda: bool(wanted))
    assert engine.clock.now_s() < 7.5


# ---- nodes that come back


def test_a_successor_under_strict_moves_back_to_a_node_that_returns(make):
    engine = make({DRIVER: 4, "other": 4}, num_ranks=4, strategy="strict")
    assert engine.place() == {0: DRIVER, 1: DRIVER, 2: "other", 3: "other"}
    del engine.groups.nodes["other"]
    assert set(engine.replace(2, 3).values()) == {DRIVER}
    engine.groups.nodes["back"] = 4  # Ray gives it another id
    assert engine.replace(3)[3] == "back"
    assert engine.replace(2)[2] == "back"
    assert engine.replace(1)[1] == DRIVER, "the numbers are even"


def test_a_successor_under_strict_moves_back_to_a_node_that_answers_again(make):
    engine = make({DRIVER: 4, "other": 4}, num_ranks=2, strategy="strict")
    assert engine.place() == {0: DRIVER, 1: "other"}
    engine.groups.silent = {"other"}
    assert engine.replace(1)[1] == DRIVER
    engine.groups.silent.clear()
    assert engine.replace(0)[0] == "other"


def test_ranks_that_restart_together_spread_over_a_node_that_returns(make):
    engine = make({DRIVER: 4}, num_ranks=4, strategy="strict")
    engine.place()
    engine.groups.nodes["other"] = 4
    assert sorted(engine.replace(0, 1, 2, 3).values()) == [DRIVER, DRIVER, "other", "other"]


def test_a_successor_without_strict_stays_on_its_node(make):
    engine = make({DRIVER: 4}, num_ranks=4)
    engine.place()
    engine.groups.nodes["other"] = 4
    assert engine.replace(0, 1, 2, 3) == dict.fromkeys(range(4), DRIVER)


def test_a_rank_does_not_move_to_a_node_that_does_not_answer(make):
    engine = make({DRIVER: 4}, num_ranks=4, strategy="strict")
    engine.place()
    engine.groups.nodes["other"] = 4
    engine.groups.silent = {"other"}
    engine.reservations.find_crashed(["other"])
    assert engine.replace(3)[3] == DRIVER


# ---- groups that the caller brought


def test_reservations_use_the_callers_groups_and_do_not_remove_them(make):
    engine = make({DRIVER: 2, "other": 2}, brought=[("mine0", DRIVER), ("mine1", "other")])
    assert engine.place() == {0: DRIVER, 1: "other"}
    engine.reservations.release(rank.bundles for rank in engine.ranks.values())
    engine.reservations.close()
    assert [group.name for group in engine.groups.standing] == ["mine0", "mine1"]


def test_a_number_of_the_callers_groups_that_differs_from_the_ranks_is_refused(make):
    engine = make({DRIVER: 2}, brought=[("mine0", DRIVER)])
    with pytest.raises(InvalidConfig, match="1 placement_groups for data_parallel_size=2: give one for each rank"):
        engine.place()
    with pytest.raises(InvalidConfig, match="0 placement_groups for data_parallel_size=2"):
        make({DRIVER: 2}, brought=[]).place()


def test_an_invalid_placement_group_of_the_caller_is_refused(make):
    engine = make({DRIVER: 2}, brought=[("mine0", DRIVER), ("mine1", DRIVER)])
    engine.groups.invalid = {"mine1"}
    with pytest.raises(InvalidConfig, match="placement_groups: mine1 is RESCHEDULING"):
        engine.place()


def test_ranks_that_share_a_placement_group_take_its_bundles_in_turn(make):
    engine = make({DRIVER: 4}, brought=[("shared", DRIVER, "other")] * 2)
    assert engine.place() == {0: DRIVER, 1: "other"}


def test_ranks_get_the_bundles_that_the_caller_names(make):
    engine = make({DRIVER: 4, "other": 4}, brought=[("shared", DRIVER, "other", DRIVER)] * 2, indices=[[2], [1]])
    assert engine.place() == {0: DRIVER, 1: "other"}
    assert engine.replace(1) == {0: DRIVER, 1: "other"}
    assert [engine.ranks[dp_rank].bundles.indices for dp_rank in range(2)] == [[2], [1]]


def test_a_bundle_for_two_ranks_is_refused_but_not_the_same_index_in_two_groups(make):
    engine = make({DRIVER: 4}, brought=[("shared", DRIVER, DRIVER)] * 2, indices=[[1], [1]])
    with pytest.raises(InvalidConfig, match="bundle 1 of placement group shared is given to dp_rank 1 and to another"):
        engine.place()
    make({DRIVER: 4}, brought=[("one", DRIVER), ("other", DRIVER)], indices=[[0], [0]]).place()


def test_a_rank_whose_group_the_caller_has_removed_has_no_successor(make):
    engine = make({DRIVER: 4}, brought=[("mine0", DRIVER), ("mine1", DRIVER)])
    engine.place()
    engine.groups.removed = {"mine1"}
    with pytest.raises(PlacementGroupRemoved, match="mine1 is REMOVED"):
        engine.replace(1)
    assert engine.replace(0)[0] == DRIVER
    assert engine.clock.now_s() == 0.0


def test_a_rank_keeps_its_devices_and_added_ranks_get_groups(make):
    devices = [GivenDevices(DRIVER, ["3"]), GivenDevices(DRIVER, ["1"])]
    engine = make({DRIVER: 4}, given=GivenPlaces(devices=devices))
    engine.place()
    engine.replace(0, 1)
    assert [engine.ranks[dp_rank].bundles for dp_rank in range(2)] == devices
    assert engine.groups.standing == []
    engine.place(engine.reservations.for_growth([2], engine.ranks.values()))
    assert engine.groups.names() == {"dp2": DRIVER}
    engine.reservations.release(rank.bundles for rank in engine.ranks.values())
    assert engine.groups.standing == []


def test_a_successor_waits_for_a_group_that_ray_reschedules(make):
    engine = make({DRIVER: 2, "other": 2}, brought=[("mine0", DRIVER), ("mine1", "other")])
    engine.place()
    del engine.groups.nodes["other"]
    engine.groups.invalid = {"mine1"}

    def move() -> None:
        engine.clock.let_pass(5.0)
        engine.groups.standing[1].nodes = [DRIVER]
        engine.groups.invalid.clear()

    engine.clock.start_thread("test", move)
    assert engine.replace(1) == {0: DRIVER, 1: DRIVER}
    assert 5.0 <= engine.clock.now_s() < 8.0
    assert len(engine.groups.standing) == 2


def test_a_removed_rank_that_is_added_again_gets_the_callers_group_back(make):
    engine = make({DRIVER: 4}, brought=[("mine0", DRIVER), ("mine1", DRIVER)])
    engine.place()
    gone = engine.ranks.pop(1)
    placement = engine.reservations.for_growth([1, 2], engine.ranks.values())
    assert placement[1] == gone.bundles
    assert placement[2].group.name == "raycore_ab_dp2"
    engine.groups.invalid = {"mine1"}
    with pytest.raises(PlacementShortage, match="mine1"):
        engine.reservations.for_growth([1], engine.ranks.values())


# ---- ends


def test_no_group_is_reserved_after_the_engines_end(make):
    engine = make({DRIVER: 2})
    engine.reservations.cancel()
    with pytest.raises(InitializationError, match="the engine was shut down"):
        engine.place()
    assert engine.groups.standing == []


def test_the_reaper_is_ended_when_reservations_close(make, monkeypatch):
    engine = make({DRIVER: 2})
    killed: list[object] = []
    monkeypatch.setattr("raycore.cluster.reservations.kill", killed.append)
    reaper = object()
    monkeypatch.setattr("raycore.cluster.reservations.start_reaper", lambda name, prefix: reaper)
    engine.place()
    engine.reservations.close()
    engine.reservations.close()
    assert killed == [reaper]
