"""Guesses of the tokens that requests get next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses of the tokens that follow the last ones of m slots."""

    slots: Ints
    """[m], ascending."""
    lengths: Ints
    """[m]: how many tokens each slot's draft has."""
    padded_ids: NDArray[np.int32]
    """[m, k]: the tokens of each draft, and anything after them."""

    @staticmethod
    def of(slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> Drafts:
        """Return the drafts of these slots, which are ascending."""
        lengths = np.array([len(draft) for draft in drafts], np.int64)
        padded_ids = np.zeros((len(drafts), int(lengths.max(initial=0))), np.int32)
        padded_ids[_is_filled(padded_ids, lengths)] = np.fromiter(
            chain.from_iterable(drafts), np.int32, int(lengths.sum())
        )
        return Drafts(np.array(slots, np.int64), lengths, padded_ids)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The tokens of all drafts, one draft after the other."""
        return self.padded_ids[_is_filled(self.padded_ids, self.lengths)]

    @property
    def offsets(self) -> Ints:
        """The offset in its draft of each of `token_ids`, from 0 on."""
        firsts = np.cumsum(self.lengths) - self.lengths
        return np.arange(int(self.lengths.sum())) - np.repeat(firsts, self.lengths)

    def shortened(self, lengths: Ints) -> Drafts:
        """Return the first `lengths[i]` tokens of each draft. Drafts without tokens are left out.

        `lengths`: [m]: at most the drafts' lengths.
        """
        left = np.flatnonzero(lengths)
        return Drafts(self.slots[left], lengths[left], self.padded_ids[left])


def _is_filled(padded_ids: NDArray[np.int32], lengths: Ints) -> NDArray[np.bool_]:
    width: int = padded_ids.shape[1]
    return np.arange(width) < lengths[:, None]


NO_DRAFTS = Drafts.of([], [])
