"""How a rank that joins is brought to what is desired, with parts that only take notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LONG_S

from raycore.activity import RUNNING
from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.cluster.following import DesiredPart, Following, IsWanted, Wait
from raycore.errors import InitializationError
from raycore.messages import FIRST_WEIGHTS


class NotedPart(DesiredPart):
    """Brings the generation, as a new part would bring a field of its own."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name
        self.meanwhile: list[Callable[[], object]] = []
        """What happens while it is brought, the first time, the second time..."""

    def tell(self, ranks: Sequence[Any], desired: Desired) -> Wait:
        self.log.append(("tell", self.name, [rank.dp_rank for rank in ranks]))
        return lambda deadline_s, is_wanted: self.log.append(("wait", self.name, deadline_s))

    def bring(self, rank: Any, desired: Desired, is_wanted: IsWanted) -> None:
        self.log.append(("bring", self.name, rank.dp_rank, desired.generation))
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def follows(self, before: Desired, now: Desired) -> bool:
        return before.generation == now.generation


@pytest.fixture
def desired() -> DesiredNow:
    return DesiredNow(Desired(DesiredWeights(FIRST_WEIGHTS, "/model")), list)


def rank_of(dp_rank: int, *, awaits_group: bool = False) -> Any:
    return SimpleNamespace(dp_rank=dp_rank, awaits_group=awaits_group, has_joined=False, followed=None)


def test_all_parts_are_told_before_one_is_waited_for_and_then_each_rank_joins(desired: DesiredNow):
    log: list[Any] = []
    ranks = [rank_of(0), rank_of(1), rank_of(2, awaits_group=True)]
    Following(desired, [NotedPart(log, "a"), NotedPart(log, "b"), DesiredPart()]).follow(ranks, 7.0, lambda: True)
    told = [("tell", name, [0, 1, 2]) for name in "ab"]
    brought = [("bring", name, dp_rank, 0) for dp_rank in (0, 1) for name in "ab"]
    assert log == [*told, ("wait", "a", 7.0), ("wait", "b", 7.0), *brought]
    assert [rank.has_joined for rank in ranks] == [True, True, False]


def test_a_rank_is_brought_again_until_nothing_has_changed_meanwhile(desired: DesiredNow):
    log: list[Any] = []
    part, rank = NotedPart(log, "a"), rank_of(0)
    part.meanwhile = [
        lambda: desired.change(generation=1),
        lambda: desired.change(generation=2),
        lambda: desired.change(activity=RUNNING.paused()),  # which isn't its matter
    ]
    Following(desired, [part]).join(rank, lambda: True)
    assert [generation for *_, generation in log] == [0, 1, 2]
    assert rank.has_joined
    assert rank.followed.generation == 2


def test_a_rank_waits_for_the_end_of_an_update(desired: DesiredNow):
    log: list[Any] = []
    rank = rank_of(0)
    desired.change(is_updating=True)
    thread = threading.Thread(target=lambda: Following(desired, [NotedPart(log, "a")]).join(rank, lambda: True))
    thread.start()
    thread.join(0.05)
    assert (log, rank.has_joined) == ([], False)
    desired.change(is_updating=False, generation=3)
    thread.join(LONG_S)
    assert log == [("bring", "a", 0, 3)]
    assert rank.has_joined


def test_a_rank_that_is_not_wanted_does_not_wait_for_an_update(desired: DesiredNow):
    desired.change(is_updating=True)
    with pytest.raises(InitializationError, match="shut down while it was starting"):
        Following(desired, []).join(rank_of(0), lambda: False)
