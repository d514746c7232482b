"""An engine's ranks come up together, or not at all, and leave nothing behind."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import ray
from fake_ranks import config, live_groups, manager_of
from job_cluster import eventually
from ray.util.placement_group import PlacementGroup, placement_group
from waiting import LONG_S

from placement.reserve import RankBundles, release
from placement.topology import free_in_group
from raycore.cluster.manager import shape_of
from raycore.config import ExecutorConfig
from raycore.errors import InitializationError, InvalidCheckpoint, InvalidConfig, PlacementShortage
from raycore.node.processes import is_running

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    yield
    assert live_groups() == []
    assert ray.is_initialized(), "the test's own Ray isn't the manager's to stop"


def test_all_ranks_come_up_in_rank_order():
    manager = manager_of(config())
    infos = manager.start()
    assert [info.dp_rank for info in infos] == [0, 1]
    assert [info.timings_s["num_local_workers"] for info in infos] == [2, 2]
    names = sorted(group["name"] for group in live_groups())
    assert [name.partition(": ")[0] for name in names] == [f"raycore_{manager.engine_id}_dp{rank}" for rank in range(2)]
    assert f": engine {manager.engine_id} of driver (pid {os.getpid()}, node " in names[0]
    manager.shutdown()
    assert not any(is_running(info.pid) for info in infos)
    manager.shutdown()


def test_the_engine_actor_has_a_bundle_after_those_of_its_worker_actors():
    shape = shape_of(config(executor=ExecutorConfig("ray")))
    assert (shape.num_cpus, shape.engine_bundle_index) == (4, 1)


@pytest.mark.parametrize(
    ("behaviour", "kind", "begins"),
    [
        ("fails in its constructor", InitializationError, "ValueError: no room for weights\n"),
        ("bad config", InvalidConfig, "max_model_len=7 is odd"),
        ("dies in init", InitializationError, "SYSTEM_ERROR"),
    ],
)
def test_a_failed_start_raises_the_error_of_the_first_rank_that_failed(
    behaviour: str, kind: type[Exception], begins: str
):
    manager = manager_of(config(behaviour))
    with pytest.raises(kind) as caught:
        manager.start()
    assert str(caught.value).startswith(begins)
    manager.shutdown()


def test_impossible_cache_sizes_and_missing_weights_are_found_before_ranks_start(tmp_path):
    base = config("starts never")
    cache = msgspec.structs.replace(base.cache, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 60)
    model = msgspec.structs.replace(base.model, model=str(tmp_path), load_format="auto")
    for changed, kind, message in (
        ({"cache": cache, "device": "cpu"}, InvalidConfig, "kv_cache_memory_bytes=.* for each of 2 workers is more"),
        ({"model": model}, InvalidCheckpoint, "no weights at all"),
    ):
        manager = manager_of(msgspec.structs.replace(base, **changed))
        with pytest.raises(kind, match=message):
            manager.start()
        assert manager.ranks == {}
        manager.shutdown()


def test_the_error_of_a_rank_that_dies_while_starting_shows_its_last_lines():
    with pytest.raises(InitializationError, match=r"\nThe last lines of process \d+:\n    no room for weights$"):
        manager_of(config("dies in init")).start()


def test_a_rank_that_never_comes_up_fails_the_start_at_the_deadline():
    executor = ExecutorConfig("inline", init_timeout_s=2.0)
    with pytest.raises(InitializationError, match=r"dp_ranks \[.*1\] didn't start within init_timeout_s=2"):
        manager_of(config("never up", executor=executor)).start()


def test_a_rank_that_does_not_stop_is_killed():
    manager = manager_of(config("deaf", executor=ExecutorConfig("inline", shutdown_timeout_s=0.3)))
    infos = manager.start()
    manager.shutdown()
    assert not any(is_running(info.pid) for info in infos)


def test_a_shape_too_large_for_the_cluster_is_refused_at_once():
    with pytest.raises(PlacementShortage, match=r"17 ranks of 1 worker(.|\n)*wait_for_nodes_s \(--wait-for-nodes\)"):
        manager_of(config(data_parallel_size=17)).start()


def test_a_manager_uses_the_callers_placement_groups_and_does_not_remove_them():
    groups = [placement_group([{"CPU": 1}, {"CPU": 1}]) for _ in range(2)]
    manager = manager_of(config(), placement_groups=groups)
    manager.start()
    assert len(live_groups()) == 2
    manager.shutdown()
    assert len(live_groups()) == 2
    release(groups)


def test_too_few_or_too_small_placement_groups_of_the_caller_are_refused():
    group = placement_group([{"CPU": 0.5}])
    with pytest.raises(InvalidConfig, match="1 placement_groups for data_parallel_size=2"):
        manager_of(config(), placement_groups=[group]).start()
    with pytest.raises(InvalidConfig, match=r"placement_groups: bundle 0 .* needs 1"):
        manager_of(config(data_parallel_size=1), placement_groups=[group]).start()
    release([group])


def bundles_in_use(group: PlacementGroup) -> list[int]:
    return [index for index in range(group.bundle_count) if free_in_group(group.id.hex()).get((index, "CPU"), 0) < 1]


def test_ranks_that_share_a_placement_group_take_its_bundles_in_rank_order():
    shared, other = placement_group([{"CPU": 1}] * 3), placement_group([{"CPU": 1}])
    manager = manager_of(config(data_parallel_size=3), placement_groups=[shared, other, shared])
    manager.start()
    assert [rank.bundles for _, rank in sorted(manager.ranks.items())] == [
        RankBundles(shared, range(1)),
        RankBundles(other, range(1)),
        RankBundles(shared, range(1, 2)),
    ]
    eventually(lambda: bundles_in_use(shared) == [0, 1])

    taken = r"bundle 0 of placement group \w+ has CPU 0 free, but a rank needs 1 of it: other actors"
    with pytest.raises(InvalidConfig, match=taken):
        manager_of(config(data_parallel_size=1, placement_timeout_s=0.2), placement_groups=[shared]).start()

    manager.shrink([1, 2])
    eventually(lambda: bundles_in_use(shared) == [0])
    manager.confirm(manager.grow([1, 2]))
    assert len(live_groups()) == 2  # the caller's
    eventually(lambda: bundles_in_use(shared) == [0, 1])
    manager.confirm(manager.grow([3]))
    assert len(live_groups()) == 3
    manager.shutdown()
    release([shared, other])


@pytest.mark.parametrize(
    ("backend", "num_bundles", "message"),
    [
        ("inline", 1, "has 1 bundles, but 2 ranks need at least 2: for each, 1 for its workers$"),
        ("ray", 3, "has 3 bundles, but 2 ranks need at least 4: for each, 1 for its workers and one for its engine$"),
    ],
)
def test_a_shared_placement_group_that_is_too_small_is_refused_with_the_numbers(backend, num_bundles, message):
    group = placement_group([{"CPU": 1}] * num_bundles)
    with pytest.raises(InvalidConfig, match=message):
        manager_of(config(executor=ExecutorConfig(backend)), placement_groups=[group, group]).start()
    release([group])


def test_a_manager_may_be_shut_down_before_its_start():
    manager_of(config()).shutdown()


def test_added_ranks_come_up_and_removed_ranks_free_their_groups():
    manager = manager_of(config(data_parallel_size=1))
    manager.start()
    added = manager.grow([1, 2])
    manager.confirm(added)
    assert sorted(manager.ranks) == [0, 1, 2]
    names = sorted(group["name"].partition(":")[0] for group in live_groups())
    assert names == [f"raycore_{manager.engine_id}_dp{dp_rank}" for dp_rank in range(3)]
    pids = [rank.info.pid for rank in added]
    manager.shrink([1, 2], timeout_s=5.0)
    assert sorted(manager.ranks) == [0]
    assert not any(is_running(pid) for pid in pids)
    assert len(live_groups()) == 1
    manager.shutdown()


def test_added_ranks_that_do_not_fit_leave_the_engine_unchanged():
    manager = manager_of(config(data_parallel_size=1))
    manager.start()
    with pytest.raises(PlacementShortage, match="20 ranks of 1 worker"):
        manager.grow(range(1, 21))
    assert sorted(manager.ranks) == [0]
    assert len(live_groups()) == 1
    manager.shutdown()


def test_added_ranks_wait_for_nodes_until_the_engine_is_shut_down():
    manager = manager_of(config(data_parallel_size=1, wait_for_nodes_s=60.0))
    manager.start()
    with ThreadPoolExecutor() as pool:
        growth = pool.submit(manager.grow, range(1, 18))
        eventually(lambda: len(live_groups()) == 18)
        assert sorted(manager.ranks) == [0]
        manager.shutdown()
        with pytest.raises(InitializationError, match="the engine was shut down"):
            growth.result(timeout=LONG_S)


def test_a_start_that_waits_for_nodes_can_be_cancelled():
    manager = manager_of(config(data_parallel_size=17, wait_for_nodes_s=60.0))
    with ThreadPoolExecutor() as pool:
        start = pool.submit(manager.start)
        eventually(lambda: len(live_groups()) == 17)
        manager.cancel()
        with pytest.raises(InitializationError, match="the engine was shut down"):
            start.result(timeout=LONG_S)


def test_a_replaced_rank_keeps_its_placement_group():
    manager = manager_of(config())
    before = manager.start()
    (rank,) = manager.replace([1])
    manager.confirm([rank])
    assert rank.info.pid != before[1].pid
    assert not is_running(before[1].pid)
    assert len(live_groups()) == 2
    manager.shutdown()
    assert not is_running(rank.info.pid)
