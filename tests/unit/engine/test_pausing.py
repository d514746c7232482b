"""A rank that pauses, sleeps and continues: its loop with a fake executor."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from configs import make_config
from fake_executor import TOKEN, FakeExecutor, request
from waiting import LONG_S

from raycore.activity import RUNNING, TAGS, Activity
from raycore.engine.core import EngineCore
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import Abort, Mailbox, SetActivity, Submit, Utility
from raycore.errors import EngineDeadError
from raycore.messages import FIRST_WEIGHTS, OutputBatch, WeightVersion

PAUSED = RUNNING.paused()


class SlowExecutor(FakeExecutor):
    """Takes a millisecond for each step, so that requests outlast a pause."""

    def result(self, plan):
        time.sleep(1e-3)
        return super().result(plan)


class Rank:
    """A rank's loop on a thread, and one client's stream."""

    def __init__(self, activity: Activity = RUNNING, depth: int = 1, executor: FakeExecutor | None = None):
        self.executor = executor or SlowExecutor(max_concurrent_batches=depth)
        self.core = EngineCore(make_config(max_model_len=4096), self.executor)
        self.executor.memory_calls.clear()
        self.mailbox = Mailbox()
        self.ended: Future[None] = Future()
        self.tokens: dict[int, int] = {}
        self.versions: list[WeightVersion] = []
        """Those of batches with tokens, without repetition."""
        self.finished: set[int] = set()
        self.num_batches = 0
        self.stream: Iterator[bytes] = self.mailbox.outputs(0)
        threading.Thread(target=self._run, args=(activity,), daemon=True).start()

    def _run(self, activity: Activity) -> None:
        try:
            self.core.set_activity(activity)
            run_loop(self.core, self.mailbox)
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        finally:
            self.mailbox.close()

    def submit(self, *seq_ids: int, max_tokens: int, flush_interval_s: float = 0.0) -> None:
        requests = [request(seq_id, max_tokens=max_tokens) for seq_id in seq_ids]
        for each in requests:
            each.flush_interval_s = flush_interval_s
        self.mailbox.put(Submit(requests))

    def set(self, activity: Activity, *, clear_cache: bool = False) -> dict[int, int]:
        command = SetActivity(activity, clear_cache)
        self.mailbox.put(command)
        return command.reply.result(LONG_S)

    def receive(self) -> None:
        """Take one batch in."""
        batch = msgspec.msgpack.decode(next(self.stream), type=OutputBatch)
        self.num_batches += bool(batch.steps)
        for version in dict.fromkeys([each for _, each in batch.versions] or [FIRST_WEIGHTS] * bool(batch.token_ids)):
            if version not in self.versions:
                self.versions.append(version)
        for seq_id, token in zip(
            np.frombuffer(batch.seq_ids, np.int64).tolist(), np.frombuffer(batch.token_ids, np.int32), strict=True
        ):
            assert token == TOKEN
            self.tokens[seq_id] = self.tokens.get(seq_id, 0) + 1
        self.finished |= {end.seq_id for end in batch.finished}

    def receive_until(self, *seq_ids: int) -> None:
        while not self.finished.issuperset(seq_ids):
            self.receive()

    def stop(self) -> None:
        self.mailbox.stop()
        self.ended.result(LONG_S)


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_paused_rank_has_sent_all_outputs_and_sends_no_more(depth: int, clear_cache: bool):
    rank = Rank(depth=depth)
    rank.submit(1, 2, max_tokens=400, flush_interval_s=60.0)  # nothing would be sent before the end
    rank.submit(3, max_tokens=400)
    while rank.tokens.get(3, 0) < 5:
        rank.receive()
    (num_sent,) = rank.set(PAUSED, clear_cache=clear_cache).values()
    while rank.num_batches < num_sent:
        rank.receive()
    num_plans, tokens = len(rank.executor.plans), dict(rank.tokens)
    assert set(tokens) == {1, 2, 3}
    assert rank.executor.in_flight == 0
    load = rank.core.load()
    if clear_cache:
        assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 3, 0.0)
    rank.submit(4, max_tokens=7)  # is accepted, and waits
    rank.mailbox.put(Abort([2]))
    assert rank.set(PAUSED) == {0: num_sent}
    time.sleep(0.02)
    assert len(rank.executor.plans) == num_plans
    rank.set(RUNNING)
    rank.receive_until(1, 3, 4)
    assert rank.tokens == {1: 400, 2: tokens[2], 3: 400, 4: 7}
    rank.core.scheduler.check_integrity()
    rank.stop()


def test_a_sleeping_rank_frees_memory_and_gets_it_back_in_parts():
    rank = Rank()
    num_blocks = rank.core.cache.num_blocks
    rank.submit(1, max_tokens=200)
    rank.receive()
    rank.set(RUNNING.put_to_sleep(1))
    rank.set(RUNNING.put_to_sleep(2))
    rank.set(RUNNING.put_to_sleep(2).woken(["kv_cache"]))  # waits for the weights
    assert rank.executor.memory_calls == [("sleep", 1, TAGS), ("sleep", 2, TAGS)]
    rank.set(PAUSED)
    assert rank.executor.memory_calls[2:] == [("wake_up", ("weights",)), ("initialize_cache", num_blocks)]
    num_plans = len(rank.executor.plans)
    rank.set(RUNNING)
    rank.receive_until(1)
    assert rank.tokens == {1: 200}
    first = rank.executor.plans[num_plans]
    assert first.freed_slots == [], "the workers' slots are new"
    assert len(first.new_requests) == 1
    rank.stop()


def test_a_rank_that_joins_a_sleeping_engine_is_asleep():
    rank = Rank(RUNNING.put_to_sleep(2).woken(["weights"]))
    rank.submit(1, max_tokens=3)
    rank.set(RUNNING.put_to_sleep(2))
    assert rank.executor.memory_calls == [("sleep", 2, ("kv_cache",)), ("sleep", 2, ("weights",))]
    assert not rank.executor.plans
    rank.set(RUNNING)
    rank.receive_until(1)
    rank.stop()


def test_a_running_rank_that_is_told_to_run_does_not_pause():
    rank = Rank()
    rank.submit(1, max_tokens=2000)
    rank.receive()
    assert list(rank.set(RUNNING)) == [0]
    assert not rank.finished
    rank.stop()


def test_a_rank_that_fails_to_sleep_ends_with_the_reason():
    rank = Rank()

    def fail(level, tags):
        raise ZeroDivisionError("in the worker")

    rank.executor.sleep = fail
    with pytest.raises(ZeroDivisionError):
        rank.set(RUNNING.put_to_sleep(1))
    with pytest.raises(ZeroDivisionError):
        rank.ended.result(LONG_S)


def test_a_rank_that_stops_fails_waiting_changes_of_activity():
    executor = FakeExecutor()
    rank = Rank(executor=executor)
    is_in_step, may_end = threading.Event(), threading.Event()
    original = executor.result

    def result(plan):
        is_in_step.set()
        assert may_end.wait(LONG_S)
        return original(plan)

    executor.result = result
    rank.submit(1, max_tokens=50)
    assert is_in_step.wait(LONG_S)
    command = SetActivity(PAUSED)
    rank.mailbox.put(command)
    rank.mailbox.stop()
    may_end.set()
    with pytest.raises(EngineDeadError, match="stopped before"):
        command.reply.result(LONG_S)
    rank.ended.result(LONG_S)


def call(rank: Rank, *args: object) -> None:
    command = Utility("take_weights", args, {})
    rank.mailbox.put(command)
    command.reply.result(LONG_S)


def test_a_rank_with_new_weights_computes_frozen_requests_again_and_says_so_in_outputs():
    rank = Rank()
    rank.submit(1, max_tokens=200)
    rank.receive()
    rank.set(PAUSED)
    call(rank, 1, "v1", True)
    load = rank.core.load()
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 1, 0.0), "what the old weights computed is gone"
    rank.set(RUNNING)
    rank.receive_until(1)
    assert rank.tokens == {1: 200}
    assert rank.versions == [FIRST_WEIGHTS, WeightVersion(1, "v1")]
    rank.core.scheduler.check_integrity()
    rank.stop()


def test_another_name_of_the_weights_drops_nothing():
    rank = Rank()
    rank.submit(1, max_tokens=200)
    rank.receive()
    rank.set(PAUSED)
    call(rank, 0, "better", False)
    assert rank.core.load().num_running == 1
    rank.set(RUNNING)
    rank.receive_until(1)
    assert rank.versions == [FIRST_WEIGHTS, WeightVersion(0, "better")]
    rank.stop()
