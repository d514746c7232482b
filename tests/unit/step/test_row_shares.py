"""Every row of a step is computed by one worker or by all, and is found again among the rows of all."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies

from raycore.step.batch import StepInputs
from raycore.step.row_shares import MIN_PIECE, share_rows


def step_of(counts: list[int]) -> StepInputs:
    nothing = np.zeros(0, np.int64)
    names = set(StepInputs.__slots__) - {"counts", "num_decodes", "tables_version"}
    return StepInputs(counts=np.array(counts), num_decodes=0, tables_version=0, **dict.fromkeys(names, nothing))


@hypothesis.given(strategies.lists(strategies.integers(1, 90), min_size=1, max_size=6), strategies.integers(2, 4))
def test_all_rows_are_found_among_those_of_the_workers(counts: list[int], num_workers: int) -> None:
    shares = [share_rows(step_of(counts), worker, num_workers) for worker in range(num_workers)]
    if max(counts) < 2 * num_workers * MIN_PIECE:
        assert shares == [None] * num_workers
        return
    most_rows = max(len(share.rows) for share in shares)
    gathered = np.concatenate([np.pad(share.rows, (0, most_rows - len(share.rows))) for share in shares])
    for share in shares:
        assert share.most_rows == most_rows
        assert (np.diff(share.rows) > 0).all()
        assert gathered[share.places].tolist() == list(range(sum(counts)))


def test_long_chunks_are_divided_evenly_by_the_keys_that_their_rows_see() -> None:
    counts = [1, 80, 3]
    first, second = (share_rows(step_of(counts), worker, 2) for worker in range(2))
    # the rows around the long chunk are everyone's
    assert first.rows.tolist() == [0, *range(1, 21), *range(61, 81), *range(81, 84)]
    assert second.rows.tolist() == [0, *range(21, 61), *range(81, 84)]
    assert first.rows.sum() == second.rows.sum()
