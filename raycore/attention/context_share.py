"""Which tokens of a sequence a worker's cache has, if the workers of a group each have some of them.

A group of n workers has n·S tokens in each block that the scheduler counts: S tokens in one block of each worker's
cache. The workers take turns: the first has the first S tokens, the next one the next S tokens, and so on. A worker's
own tokens, in their order, have *local* positions 0, 1, 2 and so on. Block k of a sequence has the local positions from
k·S to (k + 1)·S of every worker, so all workers use the same block tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.step.batch import Ints


@dataclass(frozen=True, slots=True)
class ContextShare:
    """One worker's share of every sequence."""

    index: int
    """The worker's number in its group."""
    size: int
    """Number of workers in the group."""
    block_size: int
    """Tokens in a block of one worker's cache."""

    def num_owned(self, counts: Ints) -> Ints:
        """Return how many of a sequence's first `counts` tokens the worker has.

        For the position of a token that it has, that is the token's local position.
        """
        round_size = self.block_size * self.size
        rounds, rest = np.divmod(counts, round_size)
        return rounds * self.block_size + np.minimum(
            np.maximum(rest - self.index * self.block_size, 0), self.block_size
        )

    def owns(self, positions: Ints) -> NDArray[np.bool_]:
        """Return for each position whether the worker has its token."""
        return positions // self.block_size % self.size == self.index

    def seen(
        self, positions: Ints, window: int | None, last: NDArray[np.integer[Any]] | None = None
    ) -> tuple[Ints, Ints]:
        """Return the local positions of the keys that the tokens at these positions see: the first ones, and the ends.

        Args:
            window: how many tokens a token sees, itself included. None: all up to its own.
            last: how many of the sequence's first tokens each token sees, as in `StepFeatures.ends`. None: all up to
                itself.
        """
        ends = self.num_owned(positions + 1 if last is None else last.astype(np.int64))
        if window is None:
            return np.zeros_like(ends), ends
        return self.num_owned(np.maximum(positions + 1 - window, 0)), ends
