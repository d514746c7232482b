"""A rank pauses, joins another group, and goes on; one that leaves stays paused for ever."""

from __future__ import annotations

from typing import Any

import pytest
from fake_executor import FakeExecutor
from sharing_executor import config_of

from raycore.config import EngineConfig
from raycore.engine.core import EngineCore
from raycore.worker.rank import Regrouping


class Workers(FakeExecutor):
    """Note what they are told by name, which group they join, and when their cache is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def regroup(self, regrouping: Regrouping, config: EngineConfig) -> None:
        self.calls.append(config.parallel.data_parallel_size)

    def initialize_cache(self, cache: Any) -> None:
        self.calls.append("allocate_cache")

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.calls += [method] if isinstance(method, str) else []
        return []


class Rank:
    """An engine that notes the order of all calls."""

    def __init__(self, *, is_new: bool = False) -> None:
        executor = Workers()
        self.core = EngineCore(config_of(2), executor, num_blocks=9 if is_new else None)
        self.calls = executor.calls
        self.calls.clear()
        self.core.scheduler.take_turns = lambda num_turns: self.calls.append(("turns", num_turns))

    @property
    def is_paused(self) -> bool:
        return not self.core.is_in_lockstep

    def change(self, before: int, after: int, *, stays: bool = True) -> None:
        self.core.regroup(Regrouping(before, after, "tcp://nowhere:1", 4), stays=stays)


def test_ranks_of_an_expert_group_warm_up_with_added_ranks():
    rank = Rank()
    rank.core.pause_for_regrouping()
    rank.change(2, 3)
    assert rank.calls == [3, "accompany_warm_up", ("turns", 1)]
    assert (rank.is_paused, rank.core.generation) == (False, 4)


def test_no_rank_warms_up_when_ranks_leave_the_expert_group():
    rank = Rank()
    rank.core.pause_for_regrouping()
    rank.change(3, 2)
    assert rank.calls == [2, ("turns", 1)]


def test_a_rank_that_leaves_the_expert_group_stays_paused():
    rank = Rank()
    rank.core.pause_for_regrouping()
    rank.change(3, 2, stays=False)
    assert rank.calls == [2]
    assert (rank.is_paused, rank.core.generation) == (True, 4)


def test_a_new_rank_is_paused_until_it_has_weights_and_then_allocates_its_cache():
    rank = Rank(is_new=True)
    assert rank.is_paused
    rank.change(2, 3)
    assert rank.calls == [3, "allocate_cache", ("turns", 1)]
    rank.core.pause_for_regrouping()
    rank.change(3, 4)
    assert rank.calls[3:] == [4, "accompany_warm_up", ("turns", 1)]


def test_a_rank_that_is_not_paused_cannot_change():
    with pytest.raises(AssertionError, match="comes first"):
        Rank().change(2, 3)
