"""Which of the tokens that a step has sampled its requests get."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.step.batch import Ints, StepInputs


class VerifiedTokens(NamedTuple):
    """What a step's requests get. R rows were sampled, and n slots were computed."""

    rows: Ints
    """The rows, of R, whose tokens are kept, ascending."""
    counts: Ints
    """[n]: number of each slot's new tokens."""


def verify(step: StepInputs, sampled_ids: NDArray[np.generic]) -> VerifiedTokens:
    """Return the rows that are kept: of each slot, those up to the first one whose token isn't its draft.

    The step samples a token after each draft as if the draft were the request's next token. A draft is right if it is
    the token that was sampled in its place. Random numbers depend only on a token's position, so that is the token that
    would have been sampled without drafts. Everything sampled after a wrong draft is dropped.

    Args:
        sampled_ids: [R]: the tokens that were sampled.
    """
    num_slots = len(step.slots)
    if step.draft_ids is None:
        return VerifiedTokens(np.arange(len(step.sampled)), np.bincount(step.sampled, minlength=num_slots))
    is_wrong = sampled_ids != step.draft_ids
    num_wrong_before = np.cumsum(is_wrong) - is_wrong
    first_rows = np.searchsorted(step.sampled, step.sampled)
    rows = np.flatnonzero(num_wrong_before == num_wrong_before[first_rows])
    return VerifiedTokens(rows, np.bincount(step.sampled[rows], minlength=num_slots))
