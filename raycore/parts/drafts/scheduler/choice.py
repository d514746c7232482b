"""Decides how many of the guessed tokens a step verifies. Pure.

A guess costs time, whether it is right or not. So a step gets the guesses with which it is expected to generate the
most tokens per second, given how likely they are right and how long steps of that size take.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_GAIN = 1.1
"""How much faster a step with guesses has to be, in tokens per second. Where nothing repeats, requests seem to now and
then, and estimates are never exact."""


def choose_lengths(
    lengths: Ints,
    rates: Floats,
    num_decodes: int,
    plain_s: float,
    drafted_s: Floats,
    drafting_s: Floats | None = None,
    calibration: float = 1.0,
) -> Ints:
    """Return how many tokens of each guess to verify, int64[n].

    The `i`-th token of a guess counts only if all before it are right. If its request's rate is r, it adds r^i tokens
    on average. So the most valuable tokens come first, and their number decides.

    Args:
        lengths: [n]: the number of tokens in each guess.
        rates: [n]: how likely a token of each guess is right if those before it are.
        num_decodes: number of tokens that the step generates without guesses.
        plain_s: how long the step takes without guesses, in seconds.
        drafted_s: [N]: how long it takes with 1 to N guessed tokens, in seconds. No more than N are chosen.
        drafting_s: how long it takes to make guesses of up to 1, 2, ... tokens, in seconds. None: they have been made.
        calibration: how many tokens really turn out right for each one that is expected.
    """
    owners = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    values = calibration * rates[owners] ** (offsets + 1)
    # ties: a guess's earlier tokens first
    best_first = np.argsort(-values, kind="stable")[: len(drafted_s)]
    num_tokens = num_decodes + np.cumsum(values[best_first])
    total_s = drafted_s[: len(best_first)]
    if drafting_s is not None:
        total_s = total_s + drafting_s[np.maximum.accumulate(offsets[best_first])]
    speeds = num_tokens / total_s
    best = int(np.argmax(speeds)) if len(speeds) else 0
    if not len(speeds) or speeds[best] * plain_s < LEAST_GAIN * num_decodes:
        return np.zeros(len(lengths), np.int64)
    return np.bincount(owners[best_first[: best + 1]], minlength=len(lengths))
