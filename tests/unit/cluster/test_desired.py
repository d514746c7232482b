"""What is desired of all ranks, and the changes of it that are under way."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LONG_S

from raycore.activity import RUNNING
from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.messages import FIRST_WEIGHTS


def desired_of(*ranks: Any) -> DesiredNow:
    return DesiredNow(Desired(DesiredWeights(FIRST_WEIGHTS, "/model")), lambda: ranks)


def test_a_change_replaces_the_value_and_names_the_ranks_that_were_told_of_the_one_before():
    runs, starts = SimpleNamespace(run_ref=object()), SimpleNamespace(run_ref=None)
    state = desired_of(runs, starts)
    before = state.now
    assert state.change(activity=RUNNING.paused(), generation=1) == [runs]
    assert (state.now.activity, state.now.generation) == (RUNNING.paused(), 1)
    assert state.now.weights == before.weights
    assert (before.activity, before.generation) == (RUNNING, 0)


@pytest.mark.parametrize("how", ["asking", "together"])
def test_ranks_are_asked_until_the_last_change_has_ended(how: str):
    state = desired_of()
    with state.asking():
        with getattr(state, how)():
            assert state.is_changing
        assert state.is_changing
    assert not state.is_changing


def test_ranks_have_to_make_progress_during_an_update():
    state = desired_of()
    state.change(is_updating=True)
    assert state.is_changing
    state.change(is_updating=False)
    assert not state.is_changing


def test_changes_that_all_ranks_make_together_wait_for_each_other_but_not_for_others():
    state, has_begun = desired_of(), threading.Event()

    def second() -> None:
        with state.together():
            has_begun.set()

    thread = threading.Thread(target=second)
    with state.together(), state.asking():
        thread.start()
        assert not has_begun.wait(0.05)
    assert has_begun.wait(LONG_S)
    thread.join(LONG_S)


def test_a_change_wakes_those_who_wait_for_one():
    state = desired_of()

    def wait() -> None:
        with state.changed:
            is_waiting.set()
            assert state.changed.wait_for(lambda: state.now.generation == 1, LONG_S)

    is_waiting, thread = threading.Event(), threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(LONG_S)
    state.change(generation=1)
    thread.join(LONG_S)
    assert not thread.is_alive()
