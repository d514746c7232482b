from __future__ import annotations

import numpy as np
import pytest

from raycore.speculation.step_times import StepTimes


def estimate(times: StepTimes, *num_tokens: int, step: int = 0) -> list[float]:
    found = times.estimate(step, np.array(num_tokens))
    assert found is not None
    return found.tolist()


def seen(*steps: tuple[int, float]) -> StepTimes:
    """Each of these (number of tokens, duration) has been seen a few times."""
    times = StepTimes()
    for num_tokens, duration_s in steps:
        for _ in range(3):
            times.observe(0, num_tokens, duration_s)
    return times


def test_a_few_steps_have_to_be_seen_and_the_shortest_counts() -> None:
    times = StepTimes()
    for duration_s in (40.0, 1.0, 1.5):
        assert times.estimate(0, np.array([1])) is None
        times.observe(0, 4, duration_s)
    assert estimate(times, 4) == [1.0]


def test_sizes_between_those_that_ran_are_interpolated() -> None:
    times = seen((4, 1.0), (16, 4.0))
    assert estimate(times, 4, 10, 16) == [1.0, 2.5, 4.0]


def test_sizes_beyond_those_that_ran_look_cheap() -> None:
    times = seen((4, 1.0), (16, 4.0))
    assert estimate(times, 1, 2, 64) == [0.25, 0.5, 4.0]


def test_steps_of_more_tokens_take_no_less() -> None:
    times = seen((4, 3.0), (16, 2.0))
    assert estimate(times, 4, 16) == [2.0, 2.0]


def test_the_average_follows_and_an_interrupted_step_counts_little() -> None:
    times = StepTimes()
    for step in range(50):
        times.observe(step, 8, 1.0)
    times.observe(50, 8, 1000.0)
    assert estimate(times, 8, step=50)[0] == pytest.approx(1.2)
    for step in range(51, 100):
        times.observe(step, 8, 0.5)
    assert estimate(times, 8, step=100)[0] == pytest.approx(0.5, rel=0.01)


def test_what_has_not_been_seen_for_long_is_taken_to_be_faster() -> None:
    times = seen((8, 1.0))
    assert estimate(times, 8, step=1000) == [0.5]
    assert estimate(times, 8, step=10**6) == [0.25]
