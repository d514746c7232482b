"""A rank with work has to answer, and to make progress."""

from __future__ import annotations

from typing import Any

import pytest
from configs import make_config
from fake_runtime import DRIVER, PENDING, FakeRuntime
from ray.exceptions import RayActorError

from raycore.cluster.watchdog import Watchdog


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def look(runtime: FakeRuntime):
    """Look at a rank every second, and return what the last look says."""
    watchdog = Watchdog(runtime.create_standby("rank", make_config(), DRIVER), 5.0, runtime)

    def look(seconds: int, answer: Any, is_busy: bool = True) -> str | None:
        runtime.answers["step_age_s"] = lambda actor: answer
        said = None
        for _ in range(seconds):
            said = watchdog.look(is_busy)
            runtime.clock.let_pass(1.0)
        return said

    return look


def test_the_watchdog_does_not_ask_an_idle_rank(runtime, look):
    assert look(100, PENDING, is_busy=False) is None
    assert runtime.called("step_age_s") == []


def test_a_rank_may_take_as_long_for_a_step_as_the_limit(look):
    assert look(100, 5.0) is None
    assert look(2, 5.1) == "its present step has taken 5.1 s"


def test_a_rank_may_take_as_long_for_an_answer_as_the_limit(look):
    assert look(6, PENDING) is None
    assert look(1, PENDING) == "it hasn't answered for 6.0 s"


def test_a_rank_is_asked_for_its_step_age_again_only_after_an_answer(runtime, look):
    look(3, PENDING)
    assert len(runtime.called("step_age_s")) == 1
    runtime.actors[0].pending["step_age_s"].set_result(0.0)
    look(4, 0.0)
    assert len(runtime.called("step_age_s")) == 3


def test_an_answer_still_counts_when_the_rank_is_idle_again(look):
    look(1, 5.1)
    assert look(1, 0.0, is_busy=False) == "its present step has taken 5.1 s"


def test_a_dead_rank_is_not_stalled(look):
    assert look(100, RayActorError(error_msg="gone")) is None
