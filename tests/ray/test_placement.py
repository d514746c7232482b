"""Reserving on a real cluster: groups stand where they were planned, and nothing stays behind."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import forked_ray
import pytest
from ray.util.placement_group import placement_group, placement_group_table
from waiting import LONG_S, eventually

from placement.errors import InvalidPlacementGroup, PlacementShortage, ReservationCancelled
from placement.plan import EngineShape
from placement.reserve import bundle_nodes, release, reserve, validate_group
from placement.topology import read_cluster

pytestmark = pytest.mark.usefixtures("ray_cluster")

ALL_GPUS = EngineShape(1, 4, gpus_per_worker=1)
"""Not all CPUs: Ray loses one for good now and then, when a program ends while its placement group is created."""


def live_groups() -> list[dict[str, Any]]:
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_read_cluster_shows_total_and_free_resources_of_each_node():
    (node,) = read_cluster().nodes
    assert (node.total["CPU"], node.total["GPU"]) == (16, 4)
    assert node.usable


def test_reserve_makes_a_group_for_each_rank_and_release_removes_all():
    shape = EngineShape(2, 2, gpus_per_worker=1)
    groups = reserve(shape, names=["raycore_test_dp0", "raycore_test_dp1"])
    try:
        assert [group.bundle_specs for group in groups] == [
            [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}]
        ] * 2
        assert {group["name"] for group in live_groups()} == {"raycore_test_dp0", "raycore_test_dp1"}
        node_id = read_cluster().nodes[0].node_id
        assert bundle_nodes(groups[1]) == [node_id] * 3
    finally:
        release(groups)
    assert live_groups() == []


def test_ranks_that_can_never_fit_are_refused_at_once_with_the_table_of_nodes():
    with pytest.raises(PlacementShortage, match=r"CPU free/total  GPU free/total"):
        reserve(EngineShape(1, 5, gpus_per_worker=1), timeout_s=1e6)
    assert live_groups() == []


def test_reserve_waits_for_resources_that_others_hold():
    first, told = reserve(ALL_GPUS), list[str]()

    def release_first(missing: str, left_s: float) -> None:
        if not told:
            release(first)
        told.append(missing)

    release(reserve(ALL_GPUS, timeout_s=LONG_S, on_wait=release_first))
    assert told[0].startswith("1 rank of 4 workers doesn't fit")


def test_reserve_gives_up_at_its_deadline_and_leaves_no_group():
    first = reserve(ALL_GPUS)
    try:
        with pytest.raises(PlacementShortage, match=r"Waited 0\.3 s"):
            reserve(EngineShape(2, 1, gpus_per_worker=1), timeout_s=0.3)
        assert len(live_groups()) == 1
    finally:
        release(first)


def test_ranks_that_do_not_fit_wait_as_pending_groups_that_an_autoscaler_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("placement.reserve._SETTLE_TIMEOUT_S", 0.2)
    seen, told = set[tuple[str, ...]](), list[str]()

    def look() -> bool:
        groups = live_groups()
        assert {group["strategy"] for group in groups} == {"STRICT_PACK"}
        seen.add(tuple(sorted(group["state"] for group in groups)))
        return True

    names = ["raycore_a: engine a", "raycore_b: engine b"]
    with pytest.raises(
        PlacementShortage, match=r"CPU free/total(.|\n)*Waited 3 s for these resources, with 1 of 2 ranks placed"
    ):
        reserve(
            EngineShape(2, 12),
            names=names,
            timeout_s=3,
            asks_for_nodes=True,
            is_wanted=look,
            on_wait=lambda missing, left_s: told.append(missing),
        )
    assert ("CREATED", "PENDING") in seen
    # on a busy machine, the first ones may come before Ray has placed a rank
    assert re.search(r"1 of 2 ranks placed \(raycore_", told[-1])
    assert "12 workers of CPU 1, an engine of CPU 1; in total: CPU 13" in told[-1]
    assert live_groups() == []


def test_reserve_asks_for_no_nodes_if_the_ranks_fit():
    groups = reserve(EngineShape(2, 1), asks_for_nodes=True)
    release(groups)


def test_reserve_waits_for_nodes_until_the_caller_cancels():
    answers = iter([True, True, False])
    with pytest.raises(ReservationCancelled):
        reserve(EngineShape(1, 99), timeout_s=60, asks_for_nodes=True, is_wanted=lambda: next(answers))
    assert live_groups() == []


@pytest.mark.parametrize(
    ("bundles", "shape", "message"),
    [
        ([{"CPU": 1}], EngineShape(1, 1), "has 1 bundles, but a rank needs at least 2"),
        ([{"CPU": 1}, {"CPU": 1}], EngineShape(1, 1, gpus_per_worker=1), "bundle 0 .* has GPU 0, .* needs 1"),
        ([{"CPU": 1}, {"CPU": 0.5}], EngineShape(1, 1), "bundle 1 .* has CPU 0.5, but the rank's engine needs 1"),
        ([{"CPU": 100}, {"CPU": 1}], EngineShape(1, 1), "is PENDING, not CREATED"),
    ],
)
def test_a_callers_group_that_can_not_hold_a_rank_is_refused(
    bundles: list[dict[str, float]], shape: EngineShape, message: str
):
    group = placement_group(bundles)
    try:
        with pytest.raises(InvalidPlacementGroup, match=message):
            validate_group(group, shape, timeout_s=0.2)
    finally:
        release([group])


@pytest.mark.parametrize("num_bundles", [1, 2])
def test_an_inline_rank_takes_a_group_with_or_without_an_engines_bundle(num_bundles: int):
    group = placement_group([{"CPU": 1}] * num_bundles)
    try:
        validate_group(group, EngineShape(1, 1, engine_cpus=0), timeout_s=10)
    finally:
        release([group])


def test_placement_groups_released_while_they_are_created_free_all_resources():
    for _ in range(60):  # removing them at once, Ray loses one in a hundred
        release([placement_group([{"GPU": 1}])])
    # Ray leaves out resources that are all in use
    eventually(lambda: read_cluster().nodes[0].available.get("GPU", 0) == 4, read_cluster)


def test_a_removed_placement_group_of_the_caller_is_refused():
    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    assert group.wait(LONG_S)
    release([group])
    with pytest.raises(InvalidPlacementGroup, match="is REMOVED, not CREATED"):
        validate_group(group, EngineShape(1, 1), timeout_s=0.2)


SEVERAL_NODES = """
import time
from concurrent.futures import ThreadPoolExecutor
import ray
from ray.cluster_utils import Cluster
from waiting import eventually
from placement.errors import PlacementShortage
from placement.plan import EngineShape
from placement.reserve import bundle_nodes, release, reserve

def add_node():
    cluster.add_node(num_cpus=3, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20)

cluster = Cluster()
for _ in range(3):
    add_node()
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

def layout(num_ranks, world_size, strategy, timeout_s=20, num_there=None, **options):
    node = None if num_there is None else own
    shape = EngineShape(num_ranks, world_size, gpus_per_worker=1, strategy=strategy, node_id=node, num_there=num_there)
    groups = reserve(shape, timeout_s=timeout_s, **options)
    nodes = [bundle_nodes(group) for group in groups]
    assert not {node for rank in nodes for node in rank} & set(options.get("avoid", []))
    assert num_there is None or [set(rank) == {own} for rank in nodes] == [i < num_there for i in range(num_ranks)]
    release(groups)
    # Ray's view of what is free lags behind
    eventually(lambda: ray.available_resources().get("GPU") == ray.cluster_resources()["GPU"])
    names = {node: "abc"[i] for i, node in enumerate(dict.fromkeys(sum(nodes, [])))}
    print(strategy, *("".join(names[node] for node in rank) for rank in nodes), flush=True)

own = ray.get_runtime_context().get_node_id()
layout(2, 2, "fill")
layout(3, 1, "strict")
layout(1, 4, "span")
layout(3, 1, "fill", num_there=1)
with ThreadPoolExecutor() as pool:
    waiting = pool.submit(layout, 3, 2, "fill", num_there=0, asks_for_nodes=True)
    time.sleep(1.0)
    assert not waiting.done()
    add_node()
    waiting.result()
try:
    layout(5, 1, "strict", timeout_s=3, asks_for_nodes=True)
except PlacementShortage as shortage:
    print(str(shortage).partition(" (")[0])
ray.shutdown()
cluster.shutdown()
"""


def test_ranks_are_placed_on_several_nodes_that_share_an_address(tmp_path):
    program = tmp_path / "several_nodes.py"
    program.write_text(SEVERAL_NODES)
    command = [sys.executable, forked_ray.__file__, str(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert run.stdout.splitlines() == [
        "fill aaa bbb",
        "strict aa bb cc",
        "span aabba",
        "fill aa bb cc",
        "fill aaa bbb ccc",
        "5 ranks of 1 worker don't fit the cluster",
    ], run.stderr
