from __future__ import annotations

import numpy as np
import pytest

from raycore.parts.drafts.scheduler.step_times import AverageStepTimes

LIFETIME = 2000


def estimate(times: AverageStepTimes, *num_tokens: int, step: int = 0) -> list[float]:
    found = times.estimate(step, np.array(num_tokens))
    assert found is not None
    return found.tolist()


def seen(*steps: tuple[int, float]) -> AverageStepTimes:
    """Each of these (number of tokens, duration) has been seen a few times."""
    times = AverageStepTimes(LIFETIME)
    for num_tokens, duration_s in steps:
        for _ in range(3):
            times.observe(0, num_tokens, duration_s)
    return times


def test_a_step_time_needs_a_few_steps_and_begins_with_the_shortest() -> None:
    times = AverageStepTimes(LIFETIME)
    for duration_s in (40.0, 1.0, 1.5):
        assert times.estimate(0, np.array([1])) is None
        times.observe(0, 4, duration_s)
    assert estimate(times, 4) == [1.0]


def test_step_times_of_sizes_between_observed_ones_are_interpolated() -> None:
    times = seen((4, 1.0), (16, 4.0))
    assert estimate(times, 4, 10, 16) == [1.0, 2.5, 4.0]


def test_step_times_of_sizes_beyond_observed_ones_are_estimated_low() -> None:
    times = seen((4, 1.0), (16, 4.0))
    assert estimate(times, 1, 2, 64) == [0.25, 0.5, 4.0]


def test_estimated_step_times_never_fall_with_more_tokens() -> None:
    times = seen((4, 3.0), (16, 2.0))
    assert estimate(times, 4, 16) == [2.5, 2.5]


def test_contradicting_step_times_are_averaged_by_their_number_of_steps() -> None:
    times = seen((4, 3.0), (8, 2.0))
    for step in range(200):
        times.observe(step, 16, 1.0)
    assert estimate(times, 16, step=200)[0] == pytest.approx(1.0, abs=0.1)


def test_the_average_step_time_follows_changes_and_an_interrupted_step_counts_little() -> None:
    times = AverageStepTimes(LIFETIME)
    for step in range(50):
        times.observe(step, 8, 1.0)
    times.observe(50, 8, 1000.0)
    assert estimate(times, 8, step=50)[0] == pytest.approx(1.1)
    for step in range(51, 100):
        times.observe(step, 8, 0.5)
    assert estimate(times, 8, step=100)[0] == pytest.approx(0.5, rel=0.01)


def test_step_times_not_observed_for_long_are_estimated_lower() -> None:
    times = seen((8, 1.0))
    assert estimate(times, 8, step=1000) == [0.5]
    assert estimate(times, 8, step=10**6) == [0.25]


def test_a_step_size_not_observed_for_long_does_not_lower_the_times_of_smaller_steps() -> None:
    times = seen((8, 1.0), (64, 1.1))
    for step in range(1000):
        times.observe(step, 8, 1.0)
    assert estimate(times, 8, 64, step=1000) == pytest.approx([1.0, 0.55], rel=0.01)


def test_an_observed_step_size_may_confirm_the_times_of_all_sizes() -> None:
    times = AverageStepTimes(LIFETIME, confirms_all=True)
    for step in (0, 1, 2, 1000):
        times.observe(step, 8, 1.0)
        times.observe(min(step, 2), 64, 2.0)
    times.observe(1000, 8, 1.0)
    assert estimate(times, 8, 64, step=1000) == [1.0, 2.0]
