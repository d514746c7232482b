"""The experts that a worker holds of a model: by which weights each was made, and which ones a worker has.

Ranks that share experts hold a part of them each. A token takes those of all ranks: if one is missing, or is of other
weights than the rest, it is another token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from simulation.worker.numbers64 import key_of

NUM_EXPERTS = 6
Experts = dict[int, int]
"""By expert: the weights of `model.UNITS[EXPERTS]` that it comes from."""


def held_by(dp_rank: int, num_ranks: int) -> range:
    """The experts of a rank among `num_ranks` that share them."""
    return range(dp_rank, NUM_EXPERTS, num_ranks)


def combined(shares: Iterable[Mapping[int, int]], wanted: Iterable[int] = range(NUM_EXPERTS)) -> np.uint64:
    """What experts do to a token: that of the weights that all of them come from, if these are the same."""
    numbers: Experts = {}
    for share in shares:
        numbers |= share
    found = {numbers.get(expert) for expert in wanted}
    (only,) = found if len(found) == 1 else (None,)
    return np.uint64(only) if only is not None else key_of("experts", sorted(numbers.items()))
