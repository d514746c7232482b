"""Which rows of a step each of several workers computes that share the rest of a step, too.

Chunks of prompts are divided. Each is cut into two pieces for each worker, and a worker gets an early and a late one,
because late tokens see more keys. All workers compute the other rows, such as decodes, which are too few to divide.
Everything follows from the step's plan, so all workers know all shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raycore.step.batch import Ints, StepInputs

MIN_PIECE = 4
"""Chunks whose pieces would have fewer rows aren't divided."""
_ALL = -1


@dataclass(frozen=True, slots=True)
class RowShares:
    """One worker's rows of a step, and where those of all are."""

    rows: Ints
    """The worker's rows, ascending."""
    most_rows: int
    """The largest number of rows of a worker."""
    places: Ints
    """[T]: for each row of the step, its index among the rows of all workers, one worker's after the other's, each
    padded to `most_rows`."""


def share_rows(step: StepInputs, worker: int, num_workers: int) -> RowShares | None:
    """Return the rows of one of the workers. None: every worker computes all rows."""
    if (step.counts < 2 * num_workers * MIN_PIECE).all():
        return None
    owners_T = np.concatenate([_owners(count, num_workers) for count in step.counts.tolist()])
    rows = [np.flatnonzero((owners_T == each) | (owners_T == _ALL)) for each in range(num_workers)]
    most_rows = max(map(len, rows))
    places_T = np.empty(len(owners_T), np.int64)
    for each in reversed(range(num_workers)):  # rows that all compute are taken from the first worker
        places_T[rows[each]] = each * most_rows + np.arange(len(rows[each]))
    return RowShares(rows[worker], most_rows, places_T)


def _owners(count: int, num_workers: int) -> Ints:
    """Return which worker computes each of `count` adjacent rows of a sequence."""
    if count < 2 * num_workers * MIN_PIECE:
        return np.full(count, _ALL)
    pieces = np.arange(count) * (2 * num_workers) // count
    return np.minimum(pieces, 2 * num_workers - 1 - pieces)
