"""Estimates how long steps take, by their number of tokens, from those that have run."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

_WEIGHT, _WEIGHT_IF_LONGER = 0.3, 0.1
"""Weight of a new duration in the average. What interrupts steps makes them longer, so longer ones count less."""
_MAX_CHANGE = 2.0
"""A duration counts as at most this multiple of the average, and at least its inverse: some steps are interrupted."""
_LEAST_STEPS = 3
"""Number of steps of similar size from which on their durations count. Among these, the shortest one does, because the
others may have been interrupted, or have done something for the first time."""
_LEAST_WORTH = 0.25
"""The fraction of an average that is left of it, however long no step has confirmed it."""
_MAX_WEIGHT = 100
"""More tokens take longer. Where averages contradict this, they are weighted by their number of steps, up to this."""


class AverageStepTimes:
    """Average durations of steps of similar size.

    Averages that haven't been confirmed for long are taken to be smaller than they were. So a size that seemed too slow
    is tried again, the sooner the less it was too slow.
    """

    def __init__(self, lifetime: int, *, confirms_all: bool = False) -> None:
        """
        Args:
            lifetime: an average loses 1 / `lifetime` of its worth in each step that doesn't confirm it, down to a
                quarter.
            confirms_all: whether a step confirms the averages of all sizes, not only that of its own.
        """
        self._lifetime = lifetime
        self._confirms_all = confirms_all
        self._tokens: dict[int, float] = {}
        """By group of sizes: the average number of tokens."""
        self._durations_s: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        """By group of sizes: the number of the last step."""
        self._num_steps: dict[int, int] = defaultdict(int)
        """By group of sizes: how many steps have run."""

    def knows(self, num_tokens: int) -> bool:
        """Whether a few steps of about this size have run."""
        return self._num_steps.get(_group(num_tokens), 0) >= _LEAST_STEPS

    def observe(self, step: int, num_tokens: int, duration_s: float) -> None:
        """Add a step's duration. `step`: its number."""
        group = _group(num_tokens)
        average_s = self._durations_s.get(group, duration_s)
        if self._num_steps[group] < _LEAST_STEPS:
            self._tokens[group], self._durations_s[group] = float(num_tokens), min(average_s, duration_s)
        else:
            bounded_s = min(max(duration_s, average_s / _MAX_CHANGE), average_s * _MAX_CHANGE)
            weight = _WEIGHT_IF_LONGER if bounded_s > average_s else _WEIGHT
            self._durations_s[group] = average_s + weight * (bounded_s - average_s)
            self._tokens[group] += weight * (num_tokens - self._tokens[group])
        self._seen[group] = step
        self._num_steps[group] += 1

    def known(self, step: int) -> tuple[list[float], list[float]]:
        """Return the sizes of which a few steps have run, in tokens, and what such steps would take now, in seconds.

        Args:
            step: the number of the next step.
        """
        groups = sorted(group for group, number in self._num_steps.items() if number >= _LEAST_STEPS)
        last = max(self._seen.values(), default=0)
        seen = [last if self._confirms_all else self._seen[group] for group in groups]
        worth = [max(_LEAST_WORTH, 1 - (step - each) / self._lifetime) for each in seen]
        weights = [each * min(_MAX_WEIGHT, self._num_steps[group]) for each, group in zip(worth, groups, strict=True)]
        durations_s = _rising([self._durations_s[group] for group in groups], weights)
        known_s = [duration_s * each for duration_s, each in zip(durations_s, worth, strict=True)]
        return [self._tokens[group] for group in groups], known_s

    def estimate(self, step: int, num_tokens: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Return the durations in seconds that steps of these sizes would have now. None: too few steps have run.

        Steps of more tokens than have been seen are taken to last as long as the largest of those. The time of fewer
        tokens is taken to be proportional to their number. Both make what hasn't been tried look cheap.

        Args:
            step: the number of the next step.
        """
        sizes, known_s = self.known(step)
        return np.interp(num_tokens, [0.0, *sizes], [0.0, *known_s]) if sizes else None


def _group(num_tokens: int) -> int:
    """Return the group of this size. There are two for each doubling."""
    return (num_tokens * num_tokens).bit_length()


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """Return the rising sequence that is closest to `values`: isotonic regression, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # of each: weighted mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        number = 1
        while pools and pools[-1][0] >= value:
            mean, other, others = pools.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight, number = weight + other, number + others
        pools.append((value, weight, number))
    return [mean for mean, _, number in pools for _ in range(number)]
