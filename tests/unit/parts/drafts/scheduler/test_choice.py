"""The lengths that are chosen are those with the highest expected speed, if that is worth the trouble."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycore.parts.drafts.scheduler.choice import choose_lengths

LEAST_GAIN = 1.1
RATES = st.sampled_from([0.0, 0.2, 0.5, 0.55, 0.9, 1.0])


def speed(lengths, rates, num_decodes: int, plain_s: float, drafted_s) -> float:
    num_drafts = sum(lengths)
    tokens = num_decodes + sum(rate**i for n, rate in zip(lengths, rates, strict=True) for i in range(1, n + 1))
    return tokens / (drafted_s[num_drafts - 1] if num_drafts else plain_s)


@given(
    guesses=st.lists(st.tuples(st.integers(1, 3), RATES), min_size=1, max_size=4),
    num_others=st.integers(0, 3),
    growth=st.lists(st.floats(0, 0.5), min_size=1, max_size=12),
)
def test_the_chosen_draft_lengths_are_the_fastest(guesses, num_others, growth) -> None:
    longest, rates = np.array([n for n, _ in guesses]), np.array([rate for _, rate in guesses])
    num_decodes = len(guesses) + num_others
    drafted_s = (1 + np.cumsum(growth))[: longest.sum()]
    chosen = choose_lengths(longest, rates, num_decodes, 1.0, drafted_s)
    assert (chosen <= longest).all()
    assert chosen.sum() <= len(drafted_s)
    found = speed(chosen, rates, num_decodes, 1.0, drafted_s)
    if not chosen.any():
        found *= LEAST_GAIN
    for lengths in itertools.product(*(range(n + 1) for n in longest)):
        if sum(lengths) <= len(drafted_s):
            assert found >= speed(lengths, rates, num_decodes, 1.0, drafted_s) - 1e-9


@pytest.mark.parametrize(
    ("seconds_for_each", "expected"),
    [(0.0, [4, 4]), (0.1, [4, 1]), (0.3, [3, 0]), (2.0, [0, 0])],
)
def test_draft_lengths_fall_with_the_time_of_a_token(seconds_for_each: float, expected: list[int]) -> None:
    drafted_s = 1 + seconds_for_each * np.arange(1, 9)
    assert choose_lengths(np.array([4, 4]), np.array([0.9, 0.6]), 2, 1.0, drafted_s).tolist() == expected


def test_draft_lengths_fall_with_the_calibration() -> None:
    drafted_s = 1 + 0.1 * np.arange(1, 9)
    arguments = np.array([4, 4]), np.array([0.9, 0.5]), 2, 1.0, drafted_s
    assert choose_lengths(*arguments).tolist() == [4, 1]
    assert choose_lengths(*arguments, calibration=0.4).tolist() == [4, 0]
    assert choose_lengths(*arguments, calibration=0.1).tolist() == [0, 0]


def test_the_draft_length_is_zero_if_no_draft_fits_the_step() -> None:
    assert choose_lengths(np.array([4]), np.array([0.9]), 1, 1.0, np.empty(0)).tolist() == [0]


def test_drafts_that_cost_time_to_make_are_shorter():
    """Each token of the longest guess takes half as long as a step."""
    lengths, rates, drafted_s = np.array([4, 4]), np.array([0.9, 0.9]), np.full(8, 1.0)
    assert choose_lengths(lengths, rates, 2, 1.0, drafted_s).tolist() == [4, 4]
    made_s = 0.5 * np.arange(1.0, 5)
    chosen = choose_lengths(lengths, rates, 2, 1.0, drafted_s, made_s)
    speeds = [(1 + sum(0.9**offset for offset in range(1, num + 1))) / (1 + 0.5 * num) for num in range(5)]
    assert chosen.tolist() == [int(np.argmax(speeds))] * 2
    assert choose_lengths(lengths, rates, 2, 1.0, drafted_s, 4 * made_s).tolist() == [0, 0]
