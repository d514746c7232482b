"""What is gathered together fits into the scratch memory."""

from __future__ import annotations

import numpy as np
import pytest

from raycore.attention import scratch
from raycore.attention.scratch import groups_that_fit, num_scratch_blocks


@pytest.mark.parametrize(
    ("num_blocks", "capacity", "groups"),
    [
        ([3, 3, 3], 9, [[0, 1, 2]]),
        ([1, 2, 1], 6, [[0, 1, 2]]),
        ([3, 3, 3], 8, [[0, 1], [2]]),
        ([1, 8, 1, 1], 8, [[1], [0, 2, 3]]),
        ([2, 8, 1, 3, 2], 8, [[1], [3, 0], [4, 2]]),
        ([5], 5, [[0]]),
    ],
)
def test_groups_are_made_of_requests_of_similar_length(
    num_blocks: list[int], capacity: int, groups: list[list[int]]
) -> None:
    assert [group.tolist() for group in groups_that_fit(np.array(num_blocks), capacity)] == groups


def test_groups_fit_the_capacity_and_hold_every_request_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_blocks = rng.integers(1, 50, rng.integers(1, 40))
        capacity = int(num_blocks.max() + rng.integers(0, 200))
        groups = groups_that_fit(num_blocks, capacity)
        assert all(len(group) * num_blocks[group].max() <= capacity for group in groups)
        assert sorted(np.concatenate(groups)) == list(range(len(num_blocks)))


def test_scratch_memory_holds_the_longest_request_and_at_most_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SCRATCH_BYTES", 1000)
    assert num_scratch_blocks(bytes_per_block=10, max_seqs=4, max_blocks=5) == 20
    assert num_scratch_blocks(bytes_per_block=10, max_seqs=400, max_blocks=5) == 100
    assert num_scratch_blocks(bytes_per_block=10, max_seqs=4, max_blocks=500) == 500
