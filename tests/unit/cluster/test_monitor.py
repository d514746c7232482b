"""A rank that ends, stalls or has to go is noticed, told of, and replaced; one that keeps failing is given up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fake_runtime import DRIVER, PENDING, in_actor
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from raycore.activity import RUNNING
from raycore.cluster.supervisor import WatchView
from raycore.errors import InitializationError

LIMITS = {"restart_backoff_s": 1.0, "crash_loop_s": 100.0, "max_rank_restarts": 3, "restart_window_s": 1000.0}


def fails_as_successor(actor: Any, *_: Any) -> Any:
    """An answer of `wait_for_init`: only the first ranks come up."""
    first = actor.runtime.actors.index(actor) < 2
    return actor.runtime.usual["wait_for_init"](actor) if first else in_actor(InitializationError("the disk is gone"))


def times_of(engine: Any, kind: str) -> list[float]:
    events = zip(engine.listener.events, engine.listener.times_s, strict=True)
    return [time_s for event, time_s in events if event[0] == kind]


# ---- losses


def test_a_lost_rank_is_reported_replaced_and_explained(start):
    engine = start()
    assert engine.listener.take() == [("up", 0, 1001), ("up", 1, 1002)]
    engine.actor(1).die()
    engine.clock.let_pass(1.0)
    assert engine.listener.take() == [("lost", [1], 1), ("up", 1, 1003), ("explained", 1)]
    assert engine.listener.errors == ["dp_rank 1 ended: process 1002 died\nlast lines of 1002"]
    assert engine.supervisor.watches() == {0: WatchView(0, False), 1: WatchView(1, False)}


def test_a_loss_is_reported_before_its_cause_and_replaced_before_its_last_lines_are_read(start):
    engine = start()
    engine.runtime.seconds_to_explain = 1.0
    engine.runtime.seconds_to_read_lines = 10.0
    engine.listener.take()
    engine.actor(1).die()
    engine.clock.let_pass(20.0)
    assert [event[0] for event in engine.listener.events] == ["lost", "up", "explained"]
    assert engine.listener.times_s == [0.0, 1.0, 11.0]


def test_a_rank_whose_run_call_raises_is_lost_and_its_process_is_killed(start):
    engine = start()
    old = engine.actor(1)
    old.die(in_actor(ValueError("a bug")))
    engine.clock.let_pass(1.0)
    assert old.is_dead
    assert "a bug" in engine.listener.errors[0]
    assert engine.pids() == {0: 1001, 1: 1003}


def test_each_loss_has_its_own_number(start):
    engine = start()
    engine.listener.take()
    for dp_rank in (1, 0, 1):
        engine.actor(dp_rank).die()
        engine.clock.let_pass(1.0)
    assert [event for event in engine.listener.events if event[0] == "lost"] == [
        ("lost", [1], 1),
        ("lost", [0], 2),
        ("lost", [1], 3),
    ]


def test_ranks_that_end_with_their_owner_are_neither_called_dead_nor_replaced(start, caplog):
    engine = start()
    engine.listener.take()
    engine.runtime.owner_has_ended = True
    for dp_rank in (0, 1):
        engine.actor(dp_rank).die()
    engine.clock.let_pass(100.0)
    assert engine.listener.take() == [("lost", [0], 1), ("lost", [1], 2)]
    assert len(engine.runtime.actors) == 2
    assert caplog.messages == []


# ---- ranks for which there is no room


def lose_node(engine: Any, dp_rank: int) -> None:
    """Take away the node of a rank."""
    del engine.groups.nodes[engine.manager.ranks[dp_rank].nodes[0]]
    engine.actor(dp_rank).die()


def test_a_shortage_is_logged_with_its_rank_and_the_ranks_that_serve_and_then_rarely(start, caplog):
    engine = start(nodes={DRIVER: 1, "other": 1})
    lose_node(engine, 1)
    engine.clock.let_pass(2000.0)
    shortages = [message for message in caplog.messages if not message.startswith("dp_rank 1 ended")]
    assert len(shortages) == 3, "at once, after 10 minutes and after 20 more"
    first, *_ = shortages[0].splitlines()
    assert first == (
        "there is no room for dp_ranks [1], which start as soon as there is, and dp_ranks [0] serve meanwhile: "
        "1 rank of 1 worker doesn't fit the cluster (strategy 'fill': each on one node)"
    )
    assert "driver  driver   0/1             0/1" in shortages[0]


def test_a_shortage_is_logged_again_when_the_nodes_change(start, caplog):
    engine = start(3, nodes={DRIVER: 1, "other": 1, "third": 1})
    lose_node(engine, 1)
    engine.clock.let_pass(100.0)
    lose_node(engine, 2)
    engine.clock.let_pass(100.0)
    about_1 = [message for message in caplog.messages if message.startswith("there is no room for dp_ranks [1]")]
    assert [re.search(r"dp_ranks \[([0-9, ]+)\] serve meanwhile", message)[1] for message in about_1] == ["0, 2", "0"]


def test_a_rank_without_room_is_not_given_up_while_others_serve_and_starts_when_there_is_room(start, caplog):
    limits = LIMITS | {"placement_timeout_s": 5.0, "restart_window_s": 100.0}
    engine = start(nodes={DRIVER: 1, "other": 1}, recovery=limits)
    lose_node(engine, 1)
    engine.clock.let_pass(500.0)  # five times the window in which the restarts would be used up
    watched = engine.supervisor.watches()[1]
    assert not watched.has_given_up
    assert "each rank needs 1 worker of CPU 1" in watched.shortage
    engine.groups.nodes["third"] = 1
    engine.clock.let_pass(5.0)
    assert engine.supervisor.watches()[1] == WatchView(1, False)
    assert engine.manager.ranks[1].nodes == ["third"]
    room, replaced = caplog.messages[-2:]
    assert room == "there is room for dp_ranks [1] again: they start"
    assert replaced.startswith("dp_ranks [1] were replaced and are serving again")


def test_an_engine_none_of_whose_ranks_has_room_is_lost(start):
    engine = start(1, nodes={"other": 1}, recovery=LIMITS | {"placement_timeout_s": 5.0})
    lose_node(engine, 0)
    engine.clock.let_pass(100.0)
    assert engine.listener.events[-1] == ("engine lost",)
    assert "1 rank of 1 worker doesn't fit" in engine.listener.errors[-1]


def test_so_is_one_whose_waits_for_room_take_longer_together_than_the_window_of_restarts(start):
    limits = LIMITS | {"placement_timeout_s": 60.0, "restart_window_s": 100.0}
    engine = start(1, nodes={"other": 1}, recovery=limits)
    lose_node(engine, 0)
    engine.clock.let_pass(400.0)
    assert engine.listener.events[-1] == ("engine lost",)


def test_a_rank_that_can_no_longer_be_monitored_keeps_no_rank_without_room_from_being_given_up(start):
    engine = start(nodes={DRIVER: 1, "other": 1}, recovery=LIMITS | {"placement_timeout_s": 5.0})
    engine.listener.is_busy = lambda dp_rank: failing(OSError("no route"))() if dp_rank == 0 else False
    engine.clock.let_pass(3.0)
    lose_node(engine, 1)
    engine.clock.let_pass(100.0)
    assert engine.listener.events[-1] == ("engine lost",)


# ---- restarts: when, and how often


def test_a_rank_that_dies_repeatedly_is_restarted_after_growing_delays(start):
    engine = start(recovery=LIMITS)
    for _ in range(3):
        engine.actor(1).die()
        engine.clock.let_pass(5.0)
    assert times_of(engine, "lost") == [0.0, 5.0, 10.0]
    assert times_of(engine, "up")[2:] == [0.0, 6.0, 12.0]


def test_a_rank_that_served_for_a_while_is_restarted_without_delay(start):
    engine = start(recovery=LIMITS)
    engine.actor(1).die()
    engine.clock.let_pass(100.0)
    engine.actor(1).die()
    engine.clock.let_pass(1.0)
    assert times_of(engine, "up")[2:] == [0.0, 100.0]


def test_a_rank_that_has_used_up_its_restarts_is_given_up_and_its_processes_end(start):
    engine = start(recovery=LIMITS)
    for _ in range(4):
        engine.actor(1).die(in_actor(ValueError("a bug")))
        engine.clock.let_pass(10.0)
    assert engine.supervisor.watches() == {0: WatchView(0, False), 1: WatchView(3, True)}
    assert [actor.pid for actor in engine.runtime.running] == [1001]
    assert not engine.supervisor.has_ended
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    assert engine.pids()[0] == 1006, "the other rank has restarts of its own"


def test_restarts_before_the_restart_window_do_not_count(start):
    engine = start(recovery=LIMITS)
    for _ in range(8):
        engine.actor(1).die()
        engine.clock.let_pass(400.0)
    assert engine.supervisor.watches()[1] == WatchView(8, False)


def test_the_engine_is_lost_when_its_last_rank_is_given_up(start):
    engine = start(recovery=LIMITS)
    engine.runtime.answers["wait_for_init"] = fails_as_successor
    engine.actor(1).die()
    engine.clock.let_pass(10.0)
    assert engine.supervisor.wait(0.0) is None
    engine.actor(0).die()
    engine.clock.let_pass(10.0)
    assert engine.listener.events[-1] == ("engine lost",)
    assert str(engine.supervisor.wait(0.0)) == engine.listener.errors[-1]
    assert engine.listener.errors[-1] == (
        "the disk is gone\ndp_ranks [0] were being restarted after: dp_rank 0 ended: process 1001 died\n"
        "last lines of 1001\ndp_ranks [0] have used up max_rank_restarts=3 within restart_window_s=1000"
    )


def test_each_failed_restart_counts_against_max_rank_restarts(start):
    engine = start(recovery=LIMITS)
    engine.runtime.answers["wait_for_init"] = fails_as_successor
    engine.actor(1).die()
    engine.clock.let_pass(2.9)
    assert len(engine.runtime.actors) == 4, "at 0 and 1 s"
    assert not engine.supervisor.watches()[1].has_given_up
    engine.clock.let_pass(0.2)
    assert len(engine.runtime.actors) == 5
    assert engine.supervisor.watches()[1] == WatchView(0, True)


def test_without_restarts_the_loss_of_the_only_rank_loses_the_engine(start):
    engine = start(1, recovery={"max_rank_restarts": 0})
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    assert [event[0] for event in engine.listener.take()] == ["up", "lost", "engine lost", "explained"]
    assert engine.listener.errors[0].startswith("dp_rank 0 ended: process 1001 died\nlast lines of 1001\ndp_ranks [0] ")


def test_a_replacement_that_does_not_fit_is_retried_while_the_others_serve_on(start):
    engine = start(nodes={DRIVER: 1, "other": 1}, recovery=LIMITS | {"placement_timeout_s": 5.0})
    engine.groups.draining.add("other")
    engine.listener.take()
    engine.actor(1).die()
    engine.clock.let_pass(6.0)
    assert [event[0] for event in engine.listener.events] == ["lost", "explained"]
    assert engine.runtime.running == [engine.actor(0)]
    engine.groups.draining.clear()
    engine.clock.let_pass(10.0)
    assert engine.groups.names() == {"dp0": DRIVER, "dp1": "other"}
    assert engine.supervisor.watches()[1] == WatchView(1, False)


# ---- stalls


def test_an_idle_rank_is_not_asked_for_its_step_age(start):
    engine = start()
    engine.actor(1).is_stopped = True
    engine.clock.let_pass(1000.0)
    assert engine.runtime.called("step_age_s") == []


def test_a_step_that_takes_too_long_ends_the_rank(start):
    engine = start(recovery={"step_timeout_s": 5.0})
    stuck, age_s = engine.actor(1), [5.0]
    engine.runtime.answers["step_age_s"] = lambda actor: age_s[0] if actor is stuck else 0.0
    engine.listener.busy = {0, 1}
    engine.clock.let_pass(3.0)
    assert not stuck.is_dead, "it takes as long as it may"
    age_s[0] = 5.1
    engine.clock.let_pass(2.0)
    assert engine.pids() == {0: 1001, 1: 1003}
    assert engine.listener.errors == [
        "dp_rank 1 (pid 1002, node driver) was killed: its present step has taken 5.1 s\nlast lines of 1002"
    ]


def test_a_stopped_process_is_killed_after_the_deadline(start):
    engine = start(recovery={"step_timeout_s": 5.0})
    stopped = engine.actor(1)
    stopped.is_stopped = True
    engine.listener.busy = {1}
    engine.clock.let_pass(5.4)
    assert not stopped.is_dead
    engine.clock.let_pass(1.0)
    assert stopped.is_dead
    assert engine.pids()[1] == 1003
    assert "hasn't answered for" in engine.listener.errors[0]


@pytest.mark.parametrize("how", ["asking", "together"])
def test_ranks_that_are_told_a_change_have_to_answer_without_requests(start, how: str):
    engine = start(recovery={"step_timeout_s": 5.0})
    engine.actor(1).is_stopped = True
    with getattr(engine.manager.desired, how)():
        engine.clock.let_pass(7.0)
    assert engine.pids() == {0: 1001, 1: 1003}


def test_a_reported_rank_is_replaced_once(start):
    engine = start()
    engine.supervisor.report(1, "its stream broke")
    engine.clock.let_pass(60.0)
    assert engine.pids() == {0: 1001, 1: 1003}
    assert engine.listener.errors == [
        "dp_rank 1 (pid 1002, node driver) was killed: its stream broke\nlast lines of 1002"
    ]


# ---- ranks that share experts


def test_the_loss_of_a_rank_restarts_all_ranks_that_share_experts(start):
    engine = start(3, enable_expert_parallel=True)
    engine.listener.take()
    engine.runtime.seconds_to_explain = 1.0
    engine.actor(2).die()
    engine.clock.let_pass(0.5)
    assert len(engine.runtime.running) == 2, "the cause is asked for before others are killed"
    engine.clock.let_pass(1.0)
    ups = [("up", dp_rank, 1004 + dp_rank) for dp_rank in range(3)]
    assert engine.listener.take() == [("lost", [0, 1, 2], 1), *ups, ("explained", 1)]
    assert engine.listener.errors == ["dp_rank 2 ended: process 1003 died\nlast lines of 1003"]


def test_ranks_that_share_experts_all_have_to_answer_if_one_has_requests(start):
    engine = start(2, enable_expert_parallel=True, recovery={"step_timeout_s": 5.0})
    engine.listener.busy = {0}
    engine.actor(1).is_stopped = True
    engine.clock.let_pass(10.0)
    assert engine.pids() == {0: 1003, 1: 1004}
    assert engine.listener.errors[0].startswith("dp_rank 1 (pid 1002")


def test_ranks_that_share_experts_are_all_killed_at_once_if_one_is_reported(start):
    engine = start(2, enable_expert_parallel=True, recovery=LIMITS)
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    engine.supervisor.report(1, "its stream broke")
    engine.clock.let_pass(0.6)
    assert engine.runtime.running == [], "also during a back-off"


# ---- nodes that are drained


def test_ranks_are_replaced_on_other_nodes_if_their_node_is_drained(start):
    engine = start(nodes={DRIVER: 1, "second": 1, "third": 1}, recovery={"drain_timeout_s": 7.0})
    engine.listener.take()
    engine.clock.let_pass(10.0)
    engine.runtime.draining = engine.groups.draining = {"second"}
    engine.listener.while_leaving = lambda: engine.clock.let_pass(3.0)
    engine.clock.let_pass(2.5)
    assert engine.listener.take() == [("leaving for now", [1], 7.0)]
    assert not engine.actor(1).is_dead, "its requests still run"
    engine.clock.let_pass(4.0)
    assert engine.listener.take() == [("up", 1, 1003)]
    assert engine.groups.names() == {"dp0": DRIVER, "dp1": "third"}


def test_paused_requests_do_not_hold_up_a_drained_node(start):
    engine = start(nodes={DRIVER: 1, "second": 1, "third": 1}, recovery={"drain_timeout_s": 7.0})
    engine.manager.desired.change(activity=RUNNING.paused())
    engine.runtime.draining = engine.groups.draining = {"second"}
    engine.clock.let_pass(3.0)
    assert ("leaving for now", [1], 0.0) in engine.listener.events


def test_a_loss_is_noticed_while_ray_does_not_say_which_nodes_are_drained(start):
    engine = start()
    asked: list[float] = []

    def wait_long() -> set[str]:
        asked.append(engine.clock.now_s())
        engine.clock.let_pass(50.0)
        return set()

    engine.runtime.draining_nodes = wait_long
    engine.clock.let_pass(3.0)
    assert asked, "Ray's control store is away"
    engine.listener.take()
    engine.actor(1).die()
    engine.clock.let_pass(1.0)
    assert [event[0] for event in engine.listener.take()] == ["lost", "up", "explained"]


def test_drained_nodes_are_seen_after_ray_could_not_say_which(start):
    engine = start(nodes={DRIVER: 1, "second": 1, "third": 1})
    engine.runtime.draining_nodes = failing(OSError("no route"))
    engine.clock.let_pass(5.0)
    engine.runtime.draining = engine.groups.draining = {"second"}
    del engine.runtime.draining_nodes
    engine.clock.let_pass(5.0)
    assert engine.groups.names() == {"dp0": DRIVER, "dp1": "third"}


# ---- the end of the owner, this process, as Ray sees it


OWNER_DIED = (
    "The actor is dead because its owner has died. Owner Id: 01ff Owner Ip address: 10.0.0.1 Owner worker exit type: "
    "SYSTEM_ERROR Worker exit detail: Owner's node has crashed."
)


def owner_died() -> ActorDiedError:
    context = ActorDiedErrorContext(error_message=OWNER_DIED, actor_id=bytes(16))
    return ActorDiedError(context)


DISOWNED = (
    "Ray takes this process for dead, so it has ended the engine's ranks and starts no others. Start the program "
    "again. Ray says: Owner's node has crashed."
)


NODE_ENDED = (
    "the Ray node of this process has ended: its daemon, the raylet, is gone. Ray ends all ranks with it, and starts "
    "none for this process any more. Start the program again on a node that is up"
)


def assert_is_lost(engine: Any, cause: str) -> None:
    assert str(engine.supervisor.wait(0.0)) == cause
    assert engine.listener.events.count(("engine lost",)) == 1
    assert engine.runtime.running == []
    assert engine.groups.standing == []
    assert {watch.has_given_up for watch in engine.supervisor.watches().values()} == {True}


def test_the_engine_is_lost_when_its_node_has_ended(start):
    engine = start()
    engine.runtime.own_node_has_ended = True
    engine.clock.let_pass(0.0)
    assert_is_lost(engine, NODE_ENDED)
    assert len(engine.runtime.actors) == 2, "none is restarted"
    assert engine.runtime.worker_ended_with == [([], True)], "after the ranks on other nodes"


def test_a_restart_that_waits_for_room_ends_when_the_own_node_has_ended(start):
    engine = start(nodes={DRIVER: 1, "other": 1})
    engine.groups.draining.add("other")
    engine.actor(1).die()
    engine.clock.let_pass(5.0)
    engine.runtime.own_node_has_ended = True
    engine.groups.draining.clear()
    engine.clock.let_pass(10.0)
    assert_is_lost(engine, NODE_ENDED)


def test_the_engine_is_lost_when_ray_ends_a_rank_because_its_owner_has_died(start):
    engine = start()
    engine.actor(1).die(owner_died())
    engine.clock.let_pass(1.0)
    assert_is_lost(engine, DISOWNED)
    assert len(engine.runtime.actors) == 2, "none is restarted"


def test_the_engine_is_lost_when_a_restart_fails_because_the_owner_has_died(start):
    engine = start()
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: owner_died()
    engine.actor(1).die()
    engine.clock.let_pass(1.0)
    assert_is_lost(engine, DISOWNED)
    assert len(engine.runtime.actors) == 3, "one attempt"


# ---- ends of the monitor


def test_a_stop_during_a_back_off_cancels_the_restart(start):
    engine = start(1, recovery=LIMITS)
    for _ in range(2):
        engine.actor(0).die()
        engine.clock.let_pass(0.5)
    engine.supervisor.stop()
    engine.clock.let_pass(100.0)
    assert len(engine.runtime.actors) == 2
    assert "engine lost" not in {event[0] for event in engine.listener.events}


def test_a_stop_of_the_engine_ends_a_successor_that_is_starting(start):
    engine = start(1, recovery=LIMITS)
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    assert len(engine.runtime.running) == 1
    engine.stop()
    engine.clock.let_pass(200.0)
    assert len(engine.runtime.actors) == 2
    assert engine.runtime.running == []


def test_a_stop_of_the_engine_does_not_wait_for_a_successor_without_room(start):
    engine = start(nodes={DRIVER: 1, "other": 1})
    del engine.groups.nodes["other"]
    engine.actor(1).die()
    engine.clock.let_pass(5.0)
    engine.supervisor.stop()
    engine.supervisor.join(50.0)
    assert engine.clock.now_s() < 10.0


def test_ranks_that_end_because_the_engine_stops_are_not_lost(start):
    engine = start()
    engine.listener.take()
    engine.stop()
    assert engine.listener.take() == []


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_monitor_that_fails_counts_its_rank_as_lost_for_good(start):
    engine = start(1)
    engine.listener.take()
    engine.listener.is_busy = failing(OSError("no route"))
    engine.clock.let_pass(3.0)
    assert engine.listener.take() == [("lost", [0], 1), ("explained", 1), ("engine lost",)]
    text = "no route\ndp_ranks [0] can no longer be monitored, and count as failed"
    assert engine.listener.errors == [text, text]


def test_a_rank_whose_monitor_fails_ends_so_that_nobody_waits_for_its_answers(start):
    engine = start()
    engine.listener.is_busy = lambda dp_rank: failing(OSError("no route"))() if dp_rank == 0 else False
    engine.clock.let_pass(3.0)
    assert engine.runtime.running == [engine.actor(1)]


def test_a_monitor_that_fails_after_a_loss_explains_that_loss(start):
    engine = start(1)
    engine.listener.take()
    engine.runtime.seconds_to_read_lines = 10.0
    engine.manager.replace = failing(OSError("no route"))
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    assert engine.listener.take() == [("lost", [0], 1), ("explained", 1), ("engine lost",)]


def test_a_monitor_that_fails_after_a_replacement_reports_another_loss(start):
    engine = start(1)
    engine.actor(0).die()
    engine.clock.let_pass(1.0)
    engine.listener.take()
    engine.listener.is_busy = failing(OSError("no route"))
    engine.clock.let_pass(3.0)
    assert engine.listener.take() == [("lost", [0], 2), ("explained", 2), ("engine lost",)]


def test_a_loss_is_explained_even_if_last_lines_cannot_be_read(start):
    engine = start()
    engine.runtime.with_last_lines = failing(OSError("no log"))
    engine.actor(1).die()
    with pytest.raises(OSError, match="no log"):
        engine.clock.let_pass(1.0)
    assert engine.listener.errors == ["dp_rank 1 ended: process 1002 died"]
    engine.clock.failures.clear()


def test_with_many_ranks_each_is_asked_for_its_step_more_rarely_and_its_end_is_noticed_at_once(start, monkeypatch):
    monkeypatch.setattr("raycore.cluster.monitor._MAX_CHECKS_PER_S", 1)
    engine = start(4)
    engine.listener.is_busy = lambda dp_rank: True
    engine.clock.let_pass(15.0)
    assert len(engine.runtime.called("step_age_s")) == 4 * 2, "after 4 s and 12 s: the answers are read in between"
    engine.listener.take()
    engine.actor(1).die()
    engine.clock.let_pass(0.1)
    assert engine.listener.take()[0] == ("lost", [1], 1)
