"""Estimates how long steps take, by their number of tokens, from those that have run."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

_WEIGHT = 0.2
"""Weight of a new duration in the average."""
_MAX_CHANGE = 2.0
"""A duration counts as at most this multiple of the average, and at least its inverse: some steps are interrupted."""
_LEAST_STEPS = 3
"""Number of steps of similar size from which on their durations count. Among these, the shortest one does, because the
others may have been interrupted, or have done something for the first time."""
_LIFETIME = 2000
"""Number of steps after which an average that no step has confirmed is worth a quarter."""
_LEAST_WORTH = 0.25


class StepTimes:
    """Average durations of steps of similar size.

    Averages that haven't been confirmed for long are taken to be smaller than they were. So a size that seemed too slow
    is tried again, the sooner the less it was too slow.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        """By group of sizes: the average number of tokens."""
        self._durations_s: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        """By group of sizes: the number of the last step."""
        self._num_steps: dict[int, int] = defaultdict(int)
        """By group of sizes."""

    def observe(self, step: int, num_tokens: int, duration_s: float) -> None:
        """Add a step's duration. `step`: its number."""
        # two groups for each doubling
        group = (num_tokens * num_tokens).bit_length()
        average_s = self._durations_s.get(group, duration_s)
        if self._num_steps[group] < _LEAST_STEPS:
            self._tokens[group], self._durations_s[group] = float(num_tokens), min(average_s, duration_s)
        else:
            bounded_s = min(max(duration_s, average_s / _MAX_CHANGE), average_s * _MAX_CHANGE)
            self._durations_s[group] = average_s + _WEIGHT * (bounded_s - average_s)
            self._tokens[group] += _WEIGHT * (num_tokens - self._tokens[group])
        self._seen[group] = step
        self._num_steps[group] += 1

    def estimate(self, step: int, num_tokens: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Return the durations in seconds that steps of these sizes would have now. None: too few steps have run.

        Steps of more tokens than have been seen are taken to last as long as the largest of those. The time of fewer
        tokens is taken to be proportional to their number. Both make what hasn't been tried look cheap.

        Args:
            step: the number of the next step.
        """
        groups = sorted(group for group, number in self._num_steps.items() if number >= _LEAST_STEPS)
        if not groups:
            return None
        worth = [max(_LEAST_WORTH, 1 - (step - self._seen[group]) / _LIFETIME) for group in groups]
        known_s = np.array([self._durations_s[group] for group in groups]) * worth
        # a step can't take longer than one with more tokens: what interrupts steps only makes averages too large
        rising_s = np.minimum.accumulate(known_s[::-1])[::-1]
        return np.interp(num_tokens, [0.0, *(self._tokens[group] for group in groups)], [0.0, *rising_s])
