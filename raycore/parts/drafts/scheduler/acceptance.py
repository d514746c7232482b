"""Estimates how often guesses are right, by comparing them with the tokens that came.

A guess is compared whether or not a step has verified it. So a request whose guesses were poor is noticed when they
become good, at no cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.parts.drafts.guesses.drafts import Drafts, Ints

_WEIGHT = 0.15
"""Weight of a compared token in its request's rate."""
_SHARED_WEIGHT = 0.02
"""Weight of a compared token in the rate with which new requests begin."""
_FIRST_RATE = 0.7
_KEPT = 0.98
"""Fraction of what a calibration knows that it keeps in each step."""
_PRIOR_TOKENS = 1.0
"""Number of tokens that a calibration assumes to have been expected, and to have been right."""


class Acceptance:
    """Latest guess and rate of each slot. The rate is how likely a guessed token is right if those before it are."""

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        """`num_tokens`: maximum length of a guess."""
        self._guesses = np.zeros((num_slots, num_tokens), np.int32)
        self._lengths = np.zeros(num_slots, np.int64)
        self._first_positions = np.zeros(num_slots, np.int64)
        """The position in its sequence of each guess's first token."""
        self._rates = np.full(num_slots, _FIRST_RATE)
        self._shared_rate = _FIRST_RATE

    def forget(self, slot: int) -> None:
        """Begin anew with another request in this slot."""
        self._lengths[slot] = 0
        self._rates[slot] = self._shared_rate

    def note(self, guesses: Drafts, first_positions: Ints) -> None:
        """Store guesses. `first_positions`: [m]: the position in its sequence of each guess's first token."""
        slots = guesses.slots
        self._guesses[slots, : guesses.padded_ids.shape[1]] = guesses.padded_ids
        self._lengths[slots], self._first_positions[slots] = guesses.lengths, first_positions

    def rates(self, slots: Ints) -> NDArray[np.float64]:
        """Return the rates of these slots."""
        return self._rates[slots]

    def expected(self, slots: Ints, lengths: Ints) -> float:
        """Return how many tokens of drafts of these lengths should be right, as the rates say."""
        rates = np.minimum(self._rates[slots], 0.999)
        return float((rates * (1 - rates**lengths) / (1 - rates)).sum())

    def compare(self, slots: Ints, tokens: NDArray[np.int32], received: Ints) -> None:
        """Compare the guesses of these slots with what has come, and update their rates.

        Args:
            tokens: by slot: the tokens of its sequence.
            received: by slot: how many of these there are.
        """
        slots = slots[self._lengths[slots] > 0]
        if not len(slots):
            return
        columns = np.arange(self._guesses.shape[1])
        positions = self._first_positions[slots, None] + columns
        num_comparable = np.minimum(self._lengths[slots], received[slots] - self._first_positions[slots])
        is_comparable = columns < num_comparable[:, None]
        came = tokens[slots[:, None], np.minimum(positions, tokens.shape[1] - 1)]
        is_right = (came == self._guesses[slots]) & is_comparable
        num_right = np.logical_and.accumulate(is_right, axis=1).sum(axis=1)
        self.learn(slots, num_comparable, num_right)
        self._lengths[slots] = 0

    def learn(self, slots: Ints, lengths: Ints, num_right: Ints) -> None:
        """Update the rates of these slots, of whose guesses so many tokens were compared, and so many were right."""
        num_compared = np.minimum(num_right + 1, lengths)
        share = num_right / np.maximum(num_compared, 1)
        self._rates[slots] += np.minimum(1.0, _WEIGHT * num_compared) * (share - self._rates[slots])
        total = int(num_compared.sum())
        if total:
            weight = min(0.5, _SHARED_WEIGHT * total)
            self._shared_rate += weight * (float(num_right.sum()) / total - self._shared_rate)


class Calibration:
    """Compares how many drafted tokens were right with how many should have been.

    Rates are averages, and tend to be high where guesses have just been right by chance. So the expected numbers are
    multiplied by the factor that would have made them right lately.
    """

    def __init__(self) -> None:
        self._expected = self._right = _PRIOR_TOKENS

    @property
    def factor(self) -> float:
        """How many tokens were right for each one that was expected."""
        return self._right / self._expected

    def observe(self, num_expected: float, num_right: int) -> None:
        """Add the drafts of a step."""
        self._forget()
        self._expected += num_expected
        self._right += num_right

    def relax(self) -> None:
        """Note that a step had no drafts, so that nothing was learned."""
        self._forget()

    def _forget(self) -> None:
        self._expected = _PRIOR_TOKENS + _KEPT * (self._expected - _PRIOR_TOKENS)
        self._right = _PRIOR_TOKENS + _KEPT * (self._right - _PRIOR_TOKENS)
