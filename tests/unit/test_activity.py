"""What an engine does, as values: pauses, sleeps of two levels, waking in parts."""

from __future__ import annotations

import pytest

from raycore.activity import RUNNING, TAGS, Activity

LIGHT, DEEP = RUNNING.put_to_sleep(1), RUNNING.put_to_sleep(2)
WEIGHTS_BACK = DEEP.woken(["weights"])


def test_a_pause_keeps_the_parts_asleep_that_are_asleep() -> None:
    assert RUNNING.paused() == Activity(is_paused=True)
    assert DEEP.paused() == DEEP


def test_a_sleep_gets_deeper_but_not_lighter() -> None:
    assert Activity(is_paused=True, sleep_level=1, asleep=TAGS) == LIGHT
    assert LIGHT.put_to_sleep(2) == DEEP
    assert DEEP.put_to_sleep(1) == DEEP


def test_waking_in_parts_ends_in_a_pause() -> None:
    assert Activity(is_paused=True, sleep_level=2, asleep=("kv_cache",)) == WEIGHTS_BACK
    assert WEIGHTS_BACK.woken(["weights", "kv_cache"]) == RUNNING.paused()
    assert DEEP.woken([]) == DEEP


@pytest.mark.parametrize(
    ("before", "after", "falling_asleep", "waking"),
    [
        (RUNNING, RUNNING.paused(), (), ()),
        (RUNNING, LIGHT, TAGS, ()),
        (LIGHT, DEEP, TAGS, ()),
        (LIGHT, LIGHT, (), ()),
        (DEEP, WEIGHTS_BACK, (), ("weights",)),
        (WEIGHTS_BACK, DEEP, ("weights",), ()),
        (RUNNING, WEIGHTS_BACK, ("kv_cache",), ()),  # a rank that joins
        (WEIGHTS_BACK, RUNNING, (), ("kv_cache",)),
        (DEEP, RUNNING.paused(), (), TAGS),
    ],
)
def test_the_parts_to_put_to_sleep_and_to_wake_follow_from_two_activities(
    before: Activity, after: Activity, falling_asleep: tuple[str, ...], waking: tuple[str, ...]
) -> None:
    assert after.falling_asleep_from(before) == falling_asleep
    assert after.waking_from(before) == waking
