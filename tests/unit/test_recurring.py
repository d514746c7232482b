"""What lasts is logged once, again when it changes, and otherwise rarely."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from raycore.recurring import Recurring


class Loop:
    """Finds a condition each second."""

    def __init__(self, **options: float) -> None:
        self.now_s = 0.0
        self.recurring = Recurring(now_s=lambda: self.now_s, **options)

    def run(self, seconds: int, *states: Hashable) -> list[float]:
        """Find these states in turn. Returns the times at which they were due."""
        due_s: list[float] = []
        for index in range(seconds):
            if self.recurring.is_due(states[index % len(states)]):
                due_s.append(self.now_s)
            self.now_s += 1.0
        return due_s


def test_a_condition_that_stays_the_same_is_due_at_once_and_then_ever_more_rarely():
    assert Loop(first_s=10.0, longest_s=40.0).run(160, "full") == [0.0, 10.0, 30.0, 70.0, 110.0, 150.0]


def test_a_condition_that_changes_is_due_when_it_does():
    loop = Loop(first_s=600.0, least_s=10.0)
    assert loop.run(60, "full") == [0.0]
    assert loop.run(60, "broken") == [60.0]


def test_a_condition_that_changes_back_is_no_news():
    loop = Loop(first_s=600.0, least_s=10.0)
    loop.run(20, "full")
    loop.run(20, "broken")
    assert loop.run(20, "full") == []


def test_a_condition_that_changes_all_the_time_is_not_due_all_the_time():
    assert Loop(least_s=10.0).run(60, *range(60)) == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert Loop(first_s=600.0, least_s=10.0).run(60, "full", "broken") == [0.0, 11.0]


@pytest.mark.parametrize("num_states", [16, 100_000])
def test_only_so_many_states_are_remembered(num_states):
    loop = Loop(least_s=0.0)
    loop.run(num_states, *range(num_states))
    assert len(loop.recurring._said) == 16


def test_a_condition_that_is_over_is_due_at_once_when_it_begins_anew():
    loop = Loop()
    assert not loop.recurring.end(), "it hadn't begun"
    assert loop.run(5, "full") == [0.0]
    assert loop.recurring.end()
    assert not loop.recurring.end()
    assert loop.run(5, "full") == [5.0]
