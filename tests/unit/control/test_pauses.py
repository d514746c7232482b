"""What the driver does to pause an engine, with ranks and clients that only take notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from overtaking import overtake
from ray.exceptions import RayActorError, RayTaskError
from replies_of_ranks import use_futures
from waiting import LONG_S, eventually

from raycore.activity import RUNNING, Activity
from raycore.client.group import RankReply
from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.control.calls import EngineCalls
from raycore.control.pauses import Pauses
from raycore.errors import EngineDeadError, InvalidInput, RaycoreError, WorkerDied, WorkerFailed
from raycore.messages import FIRST_WEIGHTS
from raycore.parts.servers.cluster.servers import Servers

PAUSED, LIGHT, DEEP = RUNNING.paused(), RUNNING.put_to_sleep(1), RUNNING.put_to_sleep(2)


class Engine:
    """Ranks 0 and 1, the manager, the supervisor and the clients. `log` has what happened, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = LONG_S) -> None:
        use_futures(monkeypatch)
        self.log: list[tuple[Any, ...]] = []
        running: list[Any] = [self._rank(dp_rank) for dp_rank in (0, 1)]
        self.desired = DesiredNow(Desired(DesiredWeights(FIRST_WEIGHTS, "/model")), lambda: running)
        self.servers = Servers()
        self.has_ended = False
        self.answers: dict[int, Callable[[Activity], dict[int, int]]] = {}
        """By dp_rank: called when the rank is told an activity, for its answer."""
        self.older_end: Future[bool] = Future()
        self.outputs_arrive = True
        self.pool = ThreadPoolExecutor()
        self.pauses = Pauses(self, self, self, timeout_s)  # pyright: ignore[reportArgumentType]
        self.calls = EngineCalls(SimpleNamespace(pauses=self.pauses))  # pyright: ignore[reportArgumentType]

    # ---- the manager

    @property
    def activity(self) -> Activity:
        return self.desired.now.activity

    def _rank(self, dp_rank: int) -> Any:
        def remote(activity: Activity, clear_cache: bool, timeout_s: float) -> Future[dict[int, int]]:
            assert self.desired.is_changing
            self.log.append((f"rank {dp_rank}", activity, clear_cache))
            return self.pool.submit(self.answers.get(dp_rank, lambda _: {0: 10 + dp_rank}), activity)

        actor = SimpleNamespace(set_activity=SimpleNamespace(remote=remote))
        return SimpleNamespace(dp_rank=dp_rank, actor=actor, info=SimpleNamespace(pid=100 + dp_rank), run_ref=object())

    # ---- the supervisor

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        return None

    def report(self, dp_rank: int, reason: str) -> None:
        self.log.append(("report", dp_rank, reason))

    # ---- the clients

    def pause_new(self) -> None:
        self.log.append(("pause_new",))

    def wait_for_older(self) -> bool:
        self.log.append(("wait",))
        return self.older_end.result(LONG_S)

    def complete_pause(self, replies: Mapping[int, RankReply], aborts: bool, timeout_s: float) -> bool:
        self.log.append(("complete", dict(replies), aborts))
        return self.outputs_arrive

    def resume_new(self) -> None:
        self.log.append(("resume_new",))
        if not self.older_end.done():
            self.older_end.set_result(False)

    def told(self) -> list[Activity]:
        """What rank 0 was told since the last call."""
        activities = [entry[1] for entry in self.log if entry[0] == "rank 0"]
        self.log.clear()
        return activities


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


REPLIES = {0: RankReply(100, {0: 10}), 1: RankReply(101, {0: 11})}


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_stops_new_requests_before_it_pauses_ranks_and_then_completes(engine: Engine, mode: Any) -> None:
    engine.older_end.set_result(True)
    engine.pauses.pause(mode, clear_cache=mode == "keep")
    ranks = [(f"rank {dp_rank}", PAUSED, mode == "keep") for dp_rank in (0, 1)]
    waits = [("wait",)] if mode == "wait" else []
    assert engine.log == [("pause_new",), *waits, *ranks, ("complete", REPLIES, mode == "abort")]
    assert engine.activity == PAUSED
    engine.log.clear()
    engine.pauses.resume()
    assert engine.log == [("rank 0", RUNNING, False), ("rank 1", RUNNING, False), ("resume_new",)]
    assert not engine.desired.is_changing


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("reads_weights", [True, False])
def test_ranks_and_updates_learn_whether_weights_are_read(engine: Engine, level: int, reads_weights: bool) -> None:
    heard: list[Any] = []
    engine.pauses.on_woken = lambda **told: heard.append((engine.activity.is_paused, told))
    engine.calls.sleep(level)
    assert not engine.pauses.wake_up(["kv_cache"], False)
    assert heard == []
    engine.log.clear()
    assert engine.pauses.wake_up(None, reads_weights)
    told, resumed = engine.told()
    assert (told.reads_weights, resumed) == (reads_weights, RUNNING)
    assert heard == [(True, {"were_dropped": level == 2, "are_read": reads_weights})]


def test_the_engine_sleeps_at_deeper_levels_and_wakes_in_parts(engine: Engine) -> None:
    engine.calls.sleep(1, "keep")
    assert engine.log[1] == ("rank 0", PAUSED, True), "the cache is cleared"
    assert engine.told() == [PAUSED, LIGHT]
    engine.calls.sleep(2)
    assert engine.told() == [LIGHT, DEEP]
    with pytest.raises(InvalidInput, match=r"asleep.*wake_up\(\)"):
        engine.pauses.resume()
    with pytest.raises(InvalidInput, match=r"asleep.*wake_up\(\)"):
        engine.pauses.pause("wait")
    assert engine.told() == []
    assert not engine.pauses.wake_up(["weights"])
    assert ("resume_new",) not in engine.log
    assert engine.told() == [DEEP.woken(["weights"])]
    assert engine.pauses.wake_up(["kv_cache"])
    assert engine.log[-1] == ("resume_new",)
    assert engine.told() == [PAUSED, RUNNING], "no rank runs before all are awake"
    engine.calls.sleep(2)
    engine.told()
    assert engine.pauses.wake_up()
    assert engine.told() == [PAUSED, RUNNING]


def test_sleep_level_0_only_pauses(engine: Engine) -> None:
    engine.calls.sleep(0)
    assert engine.log[1] == ("rank 0", PAUSED, False), "the cache is kept"
    assert engine.told() == [PAUSED]
    assert engine.pauses.wake_up(["scheduling"])
    assert engine.told() == [RUNNING]


def test_resume_of_a_running_engine_calls_no_rank(engine: Engine) -> None:
    engine.pauses.resume()
    assert engine.pauses.wake_up()
    assert engine.told() == []


@pytest.mark.parametrize(
    "call",
    [
        lambda calls: calls.pause_generation(mode="stop"),
        lambda calls: calls.sleep(3),
        lambda calls: calls.sleep(1, "now"),
        lambda calls: calls.wake_up(["all"]),
        lambda calls: calls.wake_up("weights"),
    ],
)
def test_invalid_arguments_of_pause_sleep_and_wake_up_change_nothing(
    engine: Engine, call: Callable[[EngineCalls], object]
) -> None:
    with pytest.raises(InvalidInput):
        call(engine.calls)
    assert engine.log == []


def fails(error: Exception) -> Callable[[Activity], dict[int, int]]:
    def answer(activity: Activity) -> dict[int, int]:
        raise error

    return answer


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("set_activity", "traceback", cause)


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        task_error(EngineDeadError("the engine stopped before its activity changed")),
        task_error(WorkerDied(0, 1, "node", "killed")),
    ],
)
def test_a_rank_lost_during_a_pause_is_no_error(engine: Engine, error: Exception) -> None:
    engine.answers[0] = fails(error)
    engine.calls.sleep(2)
    assert engine.activity == DEEP
    completed = next(entry for entry in engine.log if entry[0] == "complete")
    assert completed == ("complete", {1: REPLIES[1]}, True)


def test_a_worker_that_fails_to_wake_is_an_error_and_the_engine_stays_paused(engine: Engine) -> None:
    engine.calls.sleep(2)
    engine.told()
    engine.answers[1] = fails(task_error(WorkerFailed(0, "InvalidCheckpoint: gone", "traceback")))
    with pytest.raises(WorkerFailed, match="gone"):
        engine.pauses.wake_up()
    assert engine.activity == PAUSED
    del engine.answers[1]
    assert engine.pauses.wake_up()
    assert engine.told() == [PAUSED, RUNNING]


def test_updates_learn_of_weights_that_came_back_although_a_worker_failed(engine: Engine) -> None:
    heard: list[Any] = []
    engine.pauses.on_woken = lambda **told: heard.append(told)
    engine.calls.sleep(2)
    engine.answers[1] = fails(task_error(WorkerFailed(0, "InvalidCheckpoint: gone", "traceback")))
    with pytest.raises(WorkerFailed, match="gone"):
        engine.pauses.wake_up()
    assert heard == [{"were_dropped": True, "are_read": True}], "rank 0 has other weights than before"
    assert engine.activity == PAUSED


def test_an_engine_that_cannot_be_held_goes_on(engine: Engine) -> None:
    engine.outputs_arrive = False
    with pytest.raises(RaycoreError, match="didn't arrive"):
        engine.pauses.hold("start_weight_update()")
    assert engine.activity == RUNNING
    assert engine.log[-1] == ("resume_new",)


def test_weights_that_are_asleep_cannot_be_held(engine: Engine) -> None:
    engine.calls.sleep(1)
    engine.log.clear()
    with pytest.raises(InvalidInput, match=r"start_weight_update\(\): the weights are asleep: call wake_up"):
        engine.pauses.hold("start_weight_update()")
    assert engine.pauses.wake_up(), "nothing holds the engine"


def test_a_rank_that_does_not_pause_in_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_end = Engine(monkeypatch, timeout_s=0.05), threading.Event()
    engine.answers[1] = lambda activity: {0: int(may_end.wait(LONG_S))}
    engine.pauses.pause("keep")
    may_end.set()
    ((_, dp_rank, reason),) = [entry for entry in engine.log if entry[0] == "report"]
    assert dp_rank == 1
    assert "within 0.05 s" in reason


@pytest.mark.parametrize("other", ["resume", "pause"])
def test_another_pause_or_resume_cancels_a_pause_that_waits_for_requests(engine: Engine, other: str) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.pauses.pause, "wait")
        eventually(lambda: ("wait",) in engine.log)
        second = pool.submit(getattr(engine.pauses, other))
        with pytest.raises(RaycoreError, match="cancelled"):
            waiting.result(LONG_S)
        second.result(LONG_S)
    assert engine.activity == (RUNNING if other == "resume" else PAUSED)


def test_a_call_that_was_interrupted_while_it_waited_cancels_no_later_pause(engine: Engine) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    overtake(engine.pauses, "_changing", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.pauses.resume()
    engine.older_end.set_result(True)
    engine.pauses.pause("wait")
    assert [entry[0] for entry in engine.log] == ["pause_new", "wait", "rank 0", "rank 1", "complete"]


def test_a_pause_in_mode_wait_lets_requests_frozen_by_mode_keep_finish(engine: Engine) -> None:
    engine.pauses.pause("keep")
    engine.log.clear()
    engine.older_end.set_result(True)
    engine.pauses.pause("wait")
    assert [entry[0] for entry in engine.log[:5]] == ["rank 0", "rank 1", "resume_new", "pause_new", "wait"]
    assert engine.told() == [RUNNING, PAUSED]


def test_an_ended_engine_refuses_to_pause_resume_sleep_and_wake(engine: Engine) -> None:
    engine.has_ended = True
    for call in (engine.pauses.pause, engine.pauses.resume, engine.calls.sleep, engine.pauses.wake_up):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_an_engine_that_ends_during_a_pause_ends_the_call(engine: Engine) -> None:
    may_end = threading.Event()

    def die(activity: Activity) -> dict[int, int]:
        engine.has_ended = True
        may_end.wait(LONG_S)
        return {}

    engine.answers = {0: die, 1: die}
    with pytest.raises(EngineDeadError):
        engine.pauses.pause("keep")
    may_end.set()
