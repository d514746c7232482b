"""A standby waits on each node, at most one, and can be taken once it is ready."""

from __future__ import annotations

import logging
import signal
from typing import Any

import pytest
from configs import make_config
from fake_runtime import DRIVER, PENDING, FakeRuntime
from ray.exceptions import RayActorError

from raycore.cluster.standby import Standbys


class StandbysOfEngine:
    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.standbys = Standbys(lambda node: self.runtime.create_standby("standby", make_config(), node), self.runtime)

    def keep(self, *nodes: str, delay_s: float = 10.0) -> None:
        self.standbys.keep(nodes, DRIVER, delay_s)

    def let_pass(self, seconds: float) -> dict[str, Any]:
        """Wait. Returns the standbys that run, by node."""
        self.runtime.clock.let_pass(seconds)
        running = self.runtime.running
        assert len({actor.node for actor in running}) == len(running), "at most one on each node"
        return {actor.node: actor for actor in running}


@pytest.fixture
def engine():
    engine = StandbysOfEngine()
    yield engine
    engine.standbys.close()
    engine.runtime.clock.let_pass(0.0)
    assert engine.runtime.running == []


def test_standbys_start_after_a_delay(engine):
    engine.keep(DRIVER, "other")
    assert engine.let_pass(9.9) == {}
    assert set(engine.let_pass(0.2)) == {DRIVER, "other"}


def test_a_node_that_has_a_standby_gets_no_other(engine):
    engine.keep(DRIVER)
    first = engine.let_pass(11.0)[DRIVER]
    engine.keep(DRIVER, "other", delay_s=0.0)
    assert engine.let_pass(1.0)[DRIVER] is first
    assert len(engine.runtime.actors) == 2


def test_a_node_whose_standby_is_still_starting_gets_no_other(engine):
    engine.runtime.answers["stand_by"] = lambda actor: PENDING
    engine.keep(DRIVER, delay_s=0.0)
    engine.let_pass(1.0)
    engine.keep(DRIVER, delay_s=0.0)
    engine.let_pass(1.0)
    assert len(engine.runtime.actors) == 1


def test_a_later_request_for_standbys_replaces_one_whose_delay_has_not_passed(engine):
    engine.keep(DRIVER)
    engine.let_pass(5.0)
    engine.keep("other")
    assert engine.let_pass(9.0) == {}
    assert set(engine.let_pass(60.0)) == {"other"}


def test_only_standbys_on_the_drivers_node_are_stopped_while_they_wait(engine):
    engine.keep(DRIVER, "other", delay_s=0.0)
    running = engine.let_pass(1.0)
    assert (running[DRIVER].is_stopped, running["other"].is_stopped) == (True, False)
    assert engine.standbys.take(DRIVER) is running[DRIVER]
    assert not running[DRIVER].is_stopped
    assert engine.standbys.take(DRIVER) is None, "it has been taken"
    running[DRIVER].die()


def test_a_node_without_a_standby_has_none_to_take(engine):
    engine.keep("other", delay_s=0.0)
    engine.let_pass(1.0)
    assert engine.standbys.take(DRIVER) is None


def test_a_standby_that_is_starting_cannot_be_taken(engine):
    engine.runtime.answers["stand_by"] = lambda actor: PENDING
    engine.keep(DRIVER, delay_s=0.0)
    engine.let_pass(1.0)
    assert engine.standbys.take(DRIVER) is None


@pytest.mark.parametrize("answer", [RayActorError(error_msg="no memory"), PENDING], ids=["fails", "is late"])
def test_a_standby_that_fails_to_start_is_ended_and_another_may_follow(engine, caplog, answer):
    engine.runtime.answers["stand_by"] = lambda actor: answer
    engine.keep("other", delay_s=0.0)
    with caplog.at_level(logging.WARNING):
        assert engine.let_pass(301.0) == {}
    assert "can't start a standby process on node other" in caplog.text
    engine.runtime.answers.clear()
    engine.keep("other", delay_s=0.0)
    assert set(engine.let_pass(1.0)) == {"other"}


def test_closing_wakes_stopped_standbys_and_kills_those_that_outlive_the_grace_period(engine):
    engine.keep(DRIVER, delay_s=0.0)
    standby = engine.let_pass(1.0)[DRIVER]
    standby.outlives_end = True
    engine.standbys.close()
    assert engine.runtime.signals == [
        (standby.pid, number) for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL)
    ]
    assert engine.runtime.clock.now_s() == pytest.approx(1.0 + 5.0)


def test_closing_cancels_the_delayed_starts_of_standbys(engine):
    engine.keep(DRIVER)
    engine.standbys.close()
    assert engine.let_pass(60.0) == {}
    engine.keep(DRIVER, delay_s=0.0)
    assert engine.let_pass(60.0) == {}
    assert engine.runtime.actors == []


def test_closing_ends_standbys_that_are_starting(engine, caplog):
    engine.runtime.answers["stand_by"] = lambda actor: PENDING
    engine.keep(DRIVER, delay_s=0.0)
    engine.let_pass(1.0)
    engine.standbys.close()
    assert engine.let_pass(1.0) == {}
    assert caplog.text == "", "that isn't a failure"


def test_standbys_are_closed_while_ray_takes_long_to_create_them(engine):
    """Its control store is away. What it creates in the end is ended, too."""
    create = engine.runtime.create_standby

    def create_late(*args: Any) -> Any:
        engine.runtime.clock.let_pass(50.0)
        return create(*args)

    engine.runtime.create_standby = create_late
    engine.keep(DRIVER, delay_s=0.0)
    engine.let_pass(1.0)
    engine.standbys.close()
    assert engine.runtime.clock.now_s() == 1.0
    assert engine.let_pass(60.0) == {}
    assert len(engine.runtime.actors) == 1
