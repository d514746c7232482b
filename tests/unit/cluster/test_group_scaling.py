"""Ranks that share experts become more or fewer, or nothing changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_runtime import PENDING

from raycore.activity import RUNNING
from raycore.cluster.desired import DesiredWeights
from raycore.errors import InvalidConfig
from raycore.messages import WeightVersion
from raycore.parts.experts.cluster import CannotMove


@pytest.fixture
def engine(make):
    """Two ranks that share experts, and that nobody supervises."""
    engine = make(enable_expert_parallel=True)
    engine.manager.start()
    engine.runtime.answers["utility"] = lambda actor, method, *_: [(1, 2)] if method == "memory_need" else None
    return engine


def test_experts_do_not_move_while_a_rank_is_being_replaced(engine):
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    engine.manager.replace([0, 1])
    with pytest.raises(CannotMove, match="being replaced"):
        engine.group.add(1)
    assert engine.runtime.called("utility") == []


def test_experts_do_not_move_while_the_engine_sleeps(engine):
    engine.manager.desired.change(activity=RUNNING.put_to_sleep(1))
    for change in (engine.group.add, engine.group.move):
        with pytest.raises(CannotMove, match="asleep"):
            change(1)
    assert engine.runtime.called("pause_for_regrouping") == []


def test_experts_do_not_move_during_an_update_of_weights(engine):
    engine.manager.weights.open()
    with pytest.raises(InvalidConfig, match="weights are being updated"):
        engine.group.add(1)
    with pytest.raises(CannotMove, match="weights are being updated"):
        engine.group.move(1)
    assert engine.runtime.called("pause_for_regrouping") == []


def test_a_rank_joins_when_it_gets_its_weights_from_the_group(engine):
    """Its workers have none before, so no update may reach them, and no client may know of them."""
    manager, weights = engine.manager, engine.manager.weights
    (added,) = engine.group.add(3)
    assert weights.open() == [manager.ranks[0], manager.ranks[1]]
    weights.set(DesiredWeights(WeightVersion(7, "new"), None), [manager.ranks[0], manager.ranks[1]])
    weights.close()
    engine.group.move(3)
    assert (added.has_joined, added.weights.number, added.weights.is_stale) == (True, 7, False)
    # it has a cache that others can read only since it has joined
    assert added.info.kv_addresses == [f"cache of {added.actor.name}"]
    assert manager.ranks[0].info.kv_addresses == []
    assert engine.runtime.called("utility")[-1][:2] == ("take_weights", (7, "new", True, ""))


def test_added_ranks_have_as_many_blocks_as_the_smallest_cache_of_the_others(engine):
    for rank, num_blocks in zip(engine.manager.ranks.values(), (9, 7), strict=True):
        rank.info = msgspec.structs.replace(rank.info, num_blocks=num_blocks)
    engine.group.add(3)
    assert engine.runtime.called("wait_for_init")[-1][-1] == 7
    assert engine.actor(2).config.parallel.data_parallel_size == 3


def test_ranks_may_be_lost_while_room_is_reserved_for_more(engine, monkeypatch):
    """Reserving waits for Ray, and it is seen afterwards that the others are being replaced."""
    reservations, manager = engine.manager.reservations, engine.manager
    original = reservations.for_growth

    def for_growth(*args: Any) -> Any:
        placement = original(*args)
        manager.replace([0, 1])
        return placement

    monkeypatch.setattr(reservations, "for_growth", for_growth)
    with pytest.raises(CannotMove, match="being replaced"):
        engine.group.add(3)
    assert sorted(manager.ranks) == [0, 1]


def test_ranks_may_be_lost_while_it_is_seen_whether_there_is_memory(engine, monkeypatch):
    monkeypatch.setattr(engine.group, "_check_memory", lambda num_ranks: engine.manager.replace([0, 1]))
    with pytest.raises(CannotMove, match="being replaced"):
        engine.group.add(3)
    assert sorted(engine.manager.ranks) == [0, 1]
