"""Who holds a cluster's resources is read from the names of placement groups."""

from __future__ import annotations

import pytest

from placement.reserve import GroupView
from raycore.cluster import holders
from raycore.cluster.holders import describe_holders, group_name

CHAT = "engine chat of driver (pid 7, node aaaaaaaa at 10.0.0.1, job 01000000)"
A, B = "a" * 56, "b" * 56


@pytest.fixture
def groups(monkeypatch) -> list[GroupView]:
    groups: list[GroupView] = []
    monkeypatch.setattr(holders, "read_groups", lambda prefix: [g for g in groups if g.name.startswith(prefix)])
    return groups


def test_engines_that_hold_resources_are_named_with_their_owners_and_what_they_hold_on_which_node(groups):
    worker = {"CPU": 1.0, "GPU": 0.5}
    groups += [
        GroupView(group_name("12ab", 0, CHAT), [(A, worker), (A, worker), (B, {"CPU": 1.0})]),
        GroupView(group_name("12ab", 1, CHAT), [(A, worker)]),
        GroupView(group_name("cd34", 0, "engine sums of task (pid 8)"), [(B, {"CPU": 2.0})]),
    ]
    heading, first, second, how_to_end = describe_holders({"CPU", "GPU"}, "ef56")
    assert heading == "Other engines hold resources:"
    assert first == f"  {CHAT}: CPU 3 GPU 1.5 on aaaaaaaa, CPU 1 on bbbbbbbb"
    assert second == "  engine sums of task (pid 8): CPU 2 on bbbbbbbb"
    assert how_to_end.startswith("An engine ends with its owner")


@pytest.mark.parametrize(
    "name", ["elses_group", group_name("ef56", 0, "engine own of driver (pid 9)"), group_name("ef56", 0, "")]
)
def test_other_groups_and_the_engines_own_are_left_out(groups, name):
    groups.append(GroupView(name, [(A, {"CPU": 1.0})]))
    assert describe_holders({"CPU"}, "ef56") == []


def test_an_engine_that_holds_nothing_of_what_is_needed_is_left_out(groups):
    groups.append(GroupView(group_name("12ab", 0, CHAT), [(A, {"CPU": 1.0})]))
    assert describe_holders({"GPU"}, "ef56") == []


def test_an_engine_whose_groups_have_no_title_is_named_by_its_id(groups):
    groups.append(GroupView("raycore_12ab_dp0", [(A, {"CPU": 1.0})]))
    assert describe_holders({"CPU"}, "ef56")[1] == "  engine 12ab: CPU 1 on aaaaaaaa"
