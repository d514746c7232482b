"""Ranks come and go while others are lost, and the engine ends when none is left."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runtime import DRIVER, PENDING, in_actor

from raycore.activity import RUNNING
from raycore.cluster.supervisor import WatchView
from raycore.errors import EngineDeadError, InitializationError, InvalidConfig, PlacementShortage, WorkerFailed

SHARES = {"enable_expert_parallel": True}
TOO_LITTLE = [(5 << 20, 3 << 20)]
ENOUGH = [(3 << 20, 5 << 20)]


def answers_of_groups(engine: Any, need: list[tuple[int, int]] = ENOUGH) -> None:
    """Let ranks tell how much memory experts need."""
    engine.runtime.answers["utility"] = lambda actor, method, *_: {"memory_need": need}[method]


def comes_up(actor: Any, *_: Any) -> Any:
    return actor.runtime.usual["wait_for_init"](actor)


# ---- the engine's life


def test_a_started_engine_reports_all_ranks_up_in_rank_order(start):
    engine = start(3)
    assert engine.listener.take() == [("up", dp_rank, 1001 + dp_rank) for dp_rank in range(3)]
    assert engine.supervisor.watches() == {dp_rank: WatchView(0, False) for dp_rank in range(3)}
    assert not engine.supervisor.has_ended


def test_the_wait_for_the_engines_end_has_a_timeout(start):
    engine = start()
    assert engine.supervisor.wait(100.0) is None
    assert engine.clock.now_s() == 100.0


def test_a_report_of_a_rank_that_was_removed_changes_nothing(start):
    engine = start()
    engine.supervisor.report(7, "its stream broke")
    engine.supervisor.stop()
    engine.supervisor.report(1, "its stream broke")
    engine.clock.let_pass(5.0)
    assert len(engine.runtime.running) == 2


def test_ranks_that_begin_anew_with_those_of_other_servers_use_up_no_restart(start):
    engine = start(2, recovery={"max_rank_restarts": 0}, enable_expert_parallel=True)
    before = engine.pids()
    for _ in range(2):
        engine.supervisor.begin_anew("a server joins")
        engine.clock.let_pass(2.0)
        assert not engine.supervisor.has_ended
    assert not set(before.values()) & set(engine.pids().values())
    assert any("was killed: a server joins" in error for error in engine.listener.errors)
    engine.actor(0).die()
    engine.clock.let_pass(2.0)
    assert engine.supervisor.has_ended


def test_a_wait_for_the_engines_end_returns_the_cause(start):
    engine = start(1, recovery={"max_rank_restarts": 0})
    engine.actor(0).die()
    cause = engine.supervisor.wait(10.0)
    assert isinstance(cause, EngineDeadError)
    assert engine.clock.now_s() == 0.0
    with pytest.raises(EngineDeadError) as scaling:
        engine.supervisor.scale(2)
    assert scaling.value is cause


def test_a_stopped_engine_cannot_be_scaled(start):
    engine = start()
    engine.stop()
    assert engine.supervisor.has_ended
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        engine.supervisor.scale(1)


def test_a_rank_given_up_while_the_engine_stops_is_not_reported_as_a_lost_engine(start):
    engine = start(1, recovery={"max_rank_restarts": 0})
    engine.runtime.seconds_to_read_lines = 1.0
    engine.actor(0).die()
    engine.clock.let_pass(0.5)
    engine.stop()
    engine.clock.let_pass(5.0)
    assert engine.supervisor.wait(0.0) is None
    assert "engine lost" not in {event[0] for event in engine.listener.events}


def test_ranks_that_are_given_up_one_after_the_other_end_the_engine(start):
    engine = start(3, recovery={"max_rank_restarts": 0})
    for dp_rank in (2, 0):
        engine.actor(dp_rank).die()
        engine.clock.let_pass(1.0)
        assert not engine.supervisor.has_ended
    engine.actor(1).die()
    engine.clock.let_pass(1.0)
    assert str(engine.supervisor.wait(0.0)).startswith("dp_rank 1 ended")


# ---- scaling


def test_ranks_are_added_and_watched(start):
    engine = start(1)
    engine.listener.take()
    infos = engine.supervisor.scale(3)
    assert [info.dp_rank for info in infos] == [0, 1, 2]
    assert engine.listener.take() == [("up", 1, 1002), ("up", 2, 1003)]
    engine.actor(2).die()
    engine.clock.let_pass(1.0)
    assert engine.pids() == {0: 1001, 1: 1002, 2: 1004}


def test_ranks_that_are_added_while_the_engine_stops_are_not_watched(start):
    engine = start(1)
    heard = engine.listener.on_rank_event

    def stop(event: Any) -> None:
        heard(event)
        engine.supervisor.stop()

    engine.listener.on_rank_event = stop
    engine.supervisor.scale(2)
    assert engine.listener.take()[-1] == ("up", 1, 1002)
    engine.actor(1).die()
    engine.clock.let_pass(5.0)
    assert engine.listener.take() == []


def test_the_last_ranks_leave_and_may_stop_by_themselves(start):
    engine = start(3)
    engine.listener.take()
    assert [info.dp_rank for info in engine.supervisor.scale(1, 7.0)] == [0]
    assert engine.listener.take() == [("leaving", [1, 2], 7.0)]
    assert [name[-3:] for name, method, _ in engine.runtime.calls if method == "stop"] == ["dp1", "dp2"]
    assert engine.groups.names() == {"dp0": DRIVER}
    assert list(engine.supervisor.watches()) == [0]
    engine.clock.let_pass(60.0)
    assert engine.listener.take() == []


def test_a_rank_that_does_not_stop_is_killed(start):
    engine = start()
    deaf = engine.actor(1)
    engine.runtime.answers["stop"] = lambda actor: None
    deaf.outlives_end = True
    started_s = engine.clock.now_s()
    engine.supervisor.scale(1, 0.0)
    assert deaf.is_dead
    assert engine.clock.now_s() - started_s <= 5.0 + 5.0 + 0.5


@pytest.mark.parametrize(("given_s", "expected_s"), [(None, 7.0), (2.0, 2.0), (0.0, 0.0)])
def test_removed_ranks_get_the_drain_timeout_of_the_call_or_of_the_option(start, given_s, expected_s):
    engine = start(recovery={"drain_timeout_s": 7.0})
    engine.supervisor.scale(1, given_s)
    assert engine.listener.events[-1] == ("leaving", [1], expected_s)


def test_paused_ranks_are_removed_without_a_drain(start):
    engine = start()
    engine.manager.desired.change(activity=RUNNING.paused())
    engine.supervisor.scale(1, 9.0)
    assert engine.listener.events[-1] == ("leaving", [1], 0.0)


def test_scale_to_the_present_number_of_ranks_changes_nothing(start):
    engine = start()
    engine.listener.take()
    assert [info.pid for info in engine.supervisor.scale(2)] == [1001, 1002]
    assert engine.listener.take() == []


def test_scale_to_an_impossible_number_of_ranks_changes_nothing(start):
    engine = start(nodes={DRIVER: 3})
    with pytest.raises(InvalidConfig, match="data_parallel_size=0"):
        engine.supervisor.scale(0)
    with pytest.raises(PlacementShortage):
        engine.supervisor.scale(4)
    assert engine.pids() == {0: 1001, 1: 1002}
    assert engine.groups.names() == {"dp0": DRIVER, "dp1": DRIVER}


def test_ranks_that_the_start_refuses_are_not_added(start):
    engine = start(1, data_parallel_rank=0)
    engine.listener.take()
    with pytest.raises(InvalidConfig, match="data_parallel_size=2: a server with data_parallel_rank=0 has one rank"):
        engine.supervisor.scale(2)
    assert engine.pids() == {0: 1001}
    assert engine.listener.take() == []
    assert [info.pid for info in engine.supervisor.scale(1)] == [1001]


def test_a_number_of_ranks_that_does_not_change_is_not_checked(start):
    engine = start(2, data_parallel_rank=0)  # which the check refuses
    assert [info.pid for info in engine.supervisor.scale(2)] == list(engine.pids().values())


def test_an_added_rank_that_fails_is_removed_again(start):
    engine = start()
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: in_actor(InitializationError("no disk"))
    with pytest.raises(InitializationError, match="no disk"):
        engine.supervisor.scale(4)
    assert engine.pids() == {0: 1001, 1: 1002}
    assert len(engine.runtime.running) == 2
    assert list(engine.supervisor.watches()) == [0, 1]
    assert engine.groups.names() == {"dp0": DRIVER, "dp1": DRIVER}


# ---- losses during scaling


def test_a_rank_that_dies_while_it_leaves_is_not_replaced(start):
    engine = start()
    engine.listener.while_leaving = lambda: (engine.actor(1).die(), engine.clock.let_pass(5.0))
    engine.supervisor.scale(1)
    assert engine.pids() == {0: 1001}
    assert "lost" not in {event[0] for event in engine.listener.events}
    assert len(engine.runtime.actors) == 2


def test_a_rank_that_stays_is_replaced_while_another_leaves(start):
    engine = start()
    engine.listener.while_leaving = lambda: (engine.actor(0).die(), engine.clock.let_pass(5.0))
    assert [info.pid for info in engine.supervisor.scale(1)] == [1003]
    assert engine.supervisor.watches() == {0: WatchView(1, False)}


def test_a_rank_that_dies_while_others_are_added_is_replaced(start):
    engine = start(1)
    engine.listener.take()

    def init(actor: Any, *args: Any) -> Any:
        if actor.identity.dp_rank == 0:
            return comes_up(actor)
        engine.actor(0).die()
        engine.runtime.answers.clear()
        return PENDING

    engine.runtime.answers["wait_for_init"] = init
    engine.clock.start_thread("test", lambda: engine.supervisor.scale(2))
    engine.clock.let_pass(5.0)
    assert engine.listener.take() == [("lost", [0], 1), ("up", 0, 1003), ("explained", 1)]
    engine.actor(1).pending["wait_for_init"].set_result(comes_up(engine.actor(1)))
    engine.clock.let_pass(0.5)
    assert engine.listener.take() == [("up", 1, 1002)]


# ---- scaling of ranks that share experts


def test_experts_move_to_added_ranks(start):
    engine = start(2, **SHARES)
    answers_of_groups(engine)
    engine.listener.take()
    assert [info.pid for info in engine.supervisor.scale(3)] == [1001, 1002, 1003]
    assert engine.listener.take() == [("up", 2, 1003)]
    assert len(engine.runtime.called("regroup")) == 3
    assert len(engine.runtime.called("pause_for_regrouping")) == 2
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    assert engine.pids() == {0: 1004, 1: 1005, 2: 1006}
    assert {actor.config.parallel.data_parallel_size for actor in engine.runtime.running} == {3}


def test_experts_move_from_ranks_that_leave(start):
    engine = start(3, **SHARES)
    answers_of_groups(engine)
    engine.listener.take()
    assert [info.pid for info in engine.supervisor.scale(1, 7.0)] == [1001]
    assert engine.listener.take() == [("leaving", [1, 2], 7.0), ("leaving", [1, 2], 0.0)]
    assert engine.groups.names() == {"dp0": DRIVER}
    assert list(engine.supervisor.watches()) == [0]


def test_a_rank_lost_while_others_leave_is_replaced_before_experts_move(start):
    engine = start(3, **SHARES)
    answers_of_groups(engine)
    engine.listener.take()
    is_first = iter([True, False])
    engine.listener.while_leaving = lambda: next(is_first) and (engine.actor(2).die(), engine.clock.let_pass(5.0))
    engine.supervisor.scale(2, 7.0)
    kinds = [event[0] for event in engine.listener.take()]
    assert kinds == ["leaving", "lost", "up", "up", "up", "explained", "leaving"]
    assert engine.pids() == {0: 1004, 1: 1005}
    assert engine.supervisor.watches()[0] == WatchView(1, False), "restarts are remembered"


def test_all_ranks_are_restarted_if_experts_cannot_move(start):
    engine = start(2, **SHARES)
    engine.listener.take()
    engine.runtime.answers["utility"] = lambda *_: in_actor(WorkerFailed(0, "no such call", ""))
    assert [info.pid for info in engine.supervisor.scale(3, 7.0)] == [1003, 1004, 1005]
    ups = [("up", rank, 1003 + rank) for rank in range(3)]
    assert engine.listener.take() == [("leaving for now", [0, 1], 7.0), *ups]
    assert engine.runtime.called("regroup") == []
    assert {actor.config.parallel.data_parallel_size for actor in engine.runtime.running} == {3}


def test_a_rank_that_is_gone_after_a_restart_of_all_is_gone_for_good(start):
    engine = start(2, **SHARES)
    engine.listener.take()
    engine.runtime.answers["utility"] = lambda *_: in_actor(WorkerFailed(0, "no such call", ""))
    engine.supervisor.scale(1, 7.0)
    left = [("leaving for now", [0, 1], 7.0), ("leaving", [1], 0.0)]
    assert engine.listener.take() == [*left, ("up", 0, engine.pids()[0])]


def test_all_ranks_are_restarted_if_the_engine_sleeps(start):
    engine = start(2, **SHARES)
    engine.manager.desired.change(activity=RUNNING.put_to_sleep(1))
    assert [info.pid for info in engine.supervisor.scale(1)] == [1003]
    assert engine.runtime.called("pause_for_regrouping") == []


def test_too_little_memory_for_experts_changes_nothing(start):
    engine = start(3, **SHARES)
    answers_of_groups(engine, TOO_LITTLE)
    engine.listener.take()
    with pytest.raises(InvalidConfig, match=r"worker 0 of dp_rank 0 would need 5\.0 MiB more"):
        engine.supervisor.scale(2)
    assert engine.listener.take() == []
    assert len(engine.runtime.running) == 3


def test_a_failed_restart_with_a_new_number_of_ranks_goes_back_to_the_old_number(start):
    engine = start(2, **SHARES)
    engine.runtime.answers["utility"] = lambda *_: in_actor(WorkerFailed(0, "no such call", ""))
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: (
        in_actor(InitializationError("no memory")) if actor.config.parallel.data_parallel_size == 1 else comes_up(actor)
    )
    with pytest.raises(InitializationError, match="no memory"):
        engine.supervisor.scale(1)
    assert sorted(engine.pids()) == [0, 1]
    assert list(engine.supervisor.watches()) == [0, 1]
    engine.actor(1).die()
    engine.clock.let_pass(1.0)
    assert engine.listener.events[-1][0] == "explained", "they are watched"


def test_a_move_of_experts_that_fails_restarts_the_ranks_with_the_new_number(start):
    engine = start(2, **SHARES)
    answers_of_groups(engine)
    engine.listener.take()
    engine.runtime.answers["regroup"] = lambda *_: in_actor(WorkerFailed(0, "the network is gone", ""))
    assert len(engine.supervisor.scale(3)) == 3
    engine.clock.let_pass(1.0)
    assert {actor.config.parallel.data_parallel_size for actor in engine.runtime.running} == {3}
    assert "moving experts failed" in engine.listener.errors[0]
    assert engine.supervisor.watches()[2] == WatchView(1, False)


def test_a_wait_for_restarted_ranks_ends_with_the_engine(start):
    engine = start(2, recovery={"max_rank_restarts": 0}, **SHARES)
    answers_of_groups(engine)
    engine.runtime.answers["regroup"] = lambda *_: in_actor(WorkerFailed(0, "the network is gone", ""))
    with pytest.raises(EngineDeadError, match="the network is gone"):
        engine.supervisor.scale(1)
    assert engine.supervisor.has_ended
