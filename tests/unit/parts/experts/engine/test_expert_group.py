"""A rank pauses, joins another group, and goes on; one that leaves stays paused for ever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sharing_executor import config_of

from raycore.parts.experts.engine.expert_group import ExpertGroup
from raycore.worker.rank import Regrouping


class Rank:
    """Notes the order of all calls."""

    def __init__(self, *, is_new: bool = False) -> None:
        self.calls: list[object] = []
        executor = SimpleNamespace(
            regroup=lambda regrouping, config: self.calls.append(config.parallel.data_parallel_size),
            collective_rpc=self.calls.append,
        )
        scheduler = SimpleNamespace(take_turns=lambda num_turns: self.calls.append(("turns", num_turns)))
        memory = SimpleNamespace(allocate_cache=lambda: self.calls.append("allocate_cache"))
        self.group = ExpertGroup(executor, scheduler, memory, is_new=is_new)

    def change(self, before: int, after: int, *, stays: bool = True) -> None:
        self.group.change(Regrouping(before, after, "tcp://nowhere:1", 4), config_of(after), stays=stays)


def test_ranks_of_an_expert_group_warm_up_with_added_ranks():
    rank = Rank()
    rank.group.pause()
    rank.change(2, 3)
    assert rank.calls == [3, "accompany_warm_up", ("turns", 1)]
    assert (rank.group.is_paused, rank.group.generation) == (False, 4)


def test_no_rank_warms_up_when_ranks_leave_the_expert_group():
    rank = Rank()
    rank.group.pause()
    rank.change(3, 2)
    assert rank.calls == [2, ("turns", 1)]


def test_a_rank_that_leaves_the_expert_group_stays_paused():
    rank = Rank()
    rank.group.pause()
    rank.change(3, 2, stays=False)
    assert rank.calls == [2]
    assert (rank.group.is_paused, rank.group.generation) == (True, 4)


def test_a_new_rank_is_paused_until_it_has_weights_and_then_allocates_its_cache():
    rank = Rank(is_new=True)
    assert rank.group.is_paused
    rank.change(2, 3)
    assert rank.calls == [3, "allocate_cache", ("turns", 1)]
    rank.group.pause()
    rank.change(3, 4)
    assert rank.calls[3:] == [4, "accompany_warm_up", ("turns", 1)]


def test_a_rank_that_is_not_paused_cannot_change():
    with pytest.raises(AssertionError, match=r"pause\(\) comes first"):
        Rank().change(2, 3)
