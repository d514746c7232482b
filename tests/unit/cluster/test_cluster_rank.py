"""Signals reach only the processes of ranks that are up and on one node."""

from __future__ import annotations

from typing import Any

import pytest
from configs import make_config
from fake_runtime import FakeRef, FakeRuntime

from raycore.cluster.rank import Rank


def rank_on(*nodes: str, is_up: bool = True) -> Rank:
    actor: Any = FakeRuntime().create_standby("rank", make_config(), nodes[0])
    info = actor.info()
    info.worker_pids = [7, 1001, 5]
    ref: Any = FakeRef()
    return Rank(0, None, list(nodes), actor, ref, info if is_up else None)


@pytest.mark.parametrize(
    ("rank", "pids"),
    [
        (rank_on("a", "a"), [5, 7, 1001]),
        (rank_on("a", "b"), []),
        (rank_on("b", "b"), []),
        (rank_on("a", is_up=False), []),
    ],
    ids=["all of it is here", "a part is elsewhere", "it is elsewhere", "it isn't up"],
)
def test_a_ranks_processes_on_a_node_are_found(rank: Rank, pids: list[int]):
    assert rank.pids_on("a") == pids


def test_a_rank_knows_whether_all_its_processes_are_on_one_node():
    assert rank_on("a", "a").is_on_one_node
    assert not rank_on("a", "b").is_on_one_node
