from __future__ import annotations

import numpy as np
import pytest

from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.scheduler.acceptance import Acceptance, Calibration

SLOTS = np.array([0, 1, 2])


def compare(acceptance: Acceptance, came: list[list[int]]) -> list[float]:
    """The rates after each slot has got these tokens, the first one at position 5."""
    tokens = np.zeros((3, 12), np.int32)
    for slot, new in enumerate(came):
        tokens[slot, 5 : 5 + len(new)] = new
    acceptance.compare(SLOTS, tokens, 5 + np.array([len(new) for new in came]))
    return acceptance.rates(SLOTS).tolist()


def test_acceptance_rates_follow_the_share_of_right_guesses() -> None:
    acceptance = Acceptance(3, 4)
    before = acceptance.rates(SLOTS)[0]
    acceptance.note(Drafts.of([0, 1, 2], 3 * [[1, 2, 3, 4]]), np.full(3, 5))
    right, half, wrong = compare(acceptance, [[1, 2, 3, 4, 9], [1, 2, 9], [9]])
    assert wrong < half < before < right
    assert compare(acceptance, [[1], [1], [1]]) == [right, half, wrong], "a guess is compared once"


def test_guessed_tokens_that_have_not_come_yet_do_not_count_as_wrong() -> None:
    acceptance = Acceptance(3, 4)
    acceptance.note(Drafts.of([0], [[1, 2, 3, 4]]), np.array([5]))
    before = acceptance.rates(SLOTS)[0]
    assert compare(acceptance, [[1], [], []])[0] > before


def test_a_guess_that_reaches_past_the_longest_sequence_is_compared() -> None:
    acceptance = Acceptance(1, 4)
    acceptance.note(Drafts.of([0], [[1, 2, 3, 4]]), np.array([10]))
    acceptance.compare(np.array([0]), np.ones((1, 12), np.int32), np.array([12]))


def test_a_new_request_begins_with_the_rate_of_those_before() -> None:
    acceptance = Acceptance(3, 4)
    for _ in range(100):
        acceptance.note(Drafts.of([0], [[1, 2, 3, 4]]), np.array([5]))
        compare(acceptance, [[9], [], []])
    assert acceptance.rates(SLOTS)[1] == pytest.approx(0.7)
    acceptance.forget(1)
    assert acceptance.rates(SLOTS)[1] < 0.2


def test_expected_tokens_follow_the_acceptance_rates() -> None:
    acceptance = Acceptance(3, 4)
    rate = acceptance.rates(SLOTS)[0]
    expected = acceptance.expected(np.array([0, 2]), np.array([1, 3]))
    assert expected == pytest.approx(2 * rate + rate**2 + rate**3)


def test_the_calibration_follows_the_share_of_right_drafts() -> None:
    calibration = Calibration()
    assert calibration.factor == 1
    for _ in range(200):
        calibration.observe(3.0, 1)
    assert calibration.factor == pytest.approx(1 / 3, rel=0.05)
    for _ in range(300):
        calibration.relax()
    assert calibration.factor == pytest.approx(1, rel=0.5)
