"""Calls and replies, over a transport that is a list."""

import threading
from collections import deque

import pytest

from raycore.errors import EngineDeadError, InvalidInput, RpcTimeout, WorkerFailed, WorkerRefused
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.client import RpcClient
from raycore.rpc.endpoint import TransportClosed
from raycore.rpc.server import RpcServer
from raycore.rpc.wire import STEP, encode_call


class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.is_shut_down = False

    def add(self, a, b=0):
        return a + b

    def who(self):
        return self.rank

    def fail(self, rank):
        if rank == self.rank:
            raise ValueError(f"no {rank}")

    def execute_model(self, plan):
        if self.rank in plan.freed_slots:
            raise ValueError("no step")
        return StepResult(plan.step) if self.rank == 0 else None

    def shutdown(self):
        self.is_shut_down = True


class Wire:
    """A transport to workers in the same thread."""

    def __init__(self, num_workers):
        self.workers = [Worker(rank) for rank in range(num_workers)]
        self.servers = [RpcServer(worker, worker.rank) for worker in self.workers]
        self.replies = deque()
        self.is_closed = False

    def send(self, message, deadline_s):
        if self.is_closed:
            raise TransportClosed
        for rank, server in enumerate(self.servers):
            reply = server.handle(message)
            if reply is not None:
                self.replies.append((rank, reply))

    def receive(self, deadline_s):
        if self.is_closed:
            raise TransportClosed
        return self.replies.popleft() if self.replies else None


@pytest.fixture
def wire():
    return Wire(3)


@pytest.fixture
def client(wire):
    return RpcClient(wire, 3, lambda: EngineDeadError("it was closed"))


def call(client, method, *args, reply_rank=None, aggregate=None, timeout_s=5.0, **kwargs):
    return client.call(method, encode_call(method, args, kwargs, reply_rank), reply_rank, aggregate, timeout_s)


def test_results_of_a_call_come_in_rank_order(client):
    assert call(client, "add", 1, b=2).result() == [3, 3, 3]
    assert call(client, "who").result() == [0, 1, 2]
    assert call(client, lambda worker: worker.rank * 2).result() == [0, 2, 4]


@pytest.mark.parametrize("value", [None, 1.5, "text", b"bytes", (1, "a"), [None, True], {"a": [1, (2,)]}, {1, 2}])
def test_arguments_and_results_of_calls_arrive_unchanged(client, value):
    first, *_ = call(client, lambda worker, x: x, value).result()
    assert first == value
    assert type(first) is type(value)


def test_a_call_with_reply_rank_returns_that_workers_result(client):
    assert call(client, "who", reply_rank=2).result() == 2


def test_a_call_with_an_aggregate_returns_its_result(client):
    assert call(client, "who", aggregate=sum).result() == 3


def test_results_of_calls_may_be_read_in_any_order_and_twice(client):
    first, second = call(client, "add", 1), call(client, "add", 2)
    assert second.result() == [2, 2, 2]
    assert first.done()
    assert first.result() == first.result() == [1, 1, 1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failure_of_any_worker_fails_the_call(client, rank):
    pending = call(client, "fail", rank, reply_rank=0)
    with pytest.raises(WorkerFailed, match=f"ValueError: no {rank}") as raised:
        pending.result()
    assert raised.value.rank == rank
    assert "in fail" in raised.value.traceback
    assert call(client, "who").result() == [0, 1, 2]


def test_a_call_of_no_method_or_with_wrong_arguments_is_an_error_of_the_caller(client):
    for method, args, why in (
        ("", (), "method='': workers have no such method"),
        ("rank", (), "method='rank': workers have no such method"),
        ("add", (), "method='add' doesn't take these arguments: missing a required argument: 'a'"),
    ):
        with pytest.raises(WorkerRefused) as refused:
            call(client, method, *args).result()
        assert (str(refused.value), refused.value.error) == (why, f"InvalidInput: {why}")
        assert isinstance(refused.value, InvalidInput)
    with pytest.raises(WorkerFailed, match="TypeError: can only concatenate") as raised:
        call(client, "add", "a").result()
    assert not isinstance(raised.value, InvalidInput)


def test_a_call_fails_before_the_other_workers_have_replied(client, wire):
    pending = call(client, "fail", 0)
    others = [wire.replies.pop(), wire.replies.pop()]
    with pytest.raises(WorkerFailed):
        pending.result()
    wire.replies.extend(others)
    assert call(client, "who").result() == [0, 1, 2]


def test_late_replies_of_a_timed_out_call_are_discarded(client, wire):
    pending = call(client, "add", 1)
    late = [wire.replies.pop(), wire.replies.pop()]
    with pytest.raises(RpcTimeout, match=r"add timed out: no reply from workers \[1, 2\]"):
        pending.result(0.01)
    with pytest.raises(RpcTimeout):
        pending.result()
    wire.replies.extend(late)
    assert call(client, "add", 2).result() == [2, 2, 2]


def test_the_deadline_of_a_call_limits_the_wait_for_its_result(client, wire):
    pending = call(client, "add", 1, timeout_s=0.02)
    wire.replies.clear()
    with pytest.raises(RpcTimeout):
        pending.result(1e6)


def test_only_one_worker_replies_to_a_step(client, wire):
    pending = client.step(StepPlan(7), 5.0)
    assert len(wire.replies) == 1
    assert pending.result().step == 7


def test_a_failure_of_any_worker_fails_the_step(client, wire):
    pending = client.step(StepPlan(7, freed_slots=[2]), 5.0)
    wire.replies.popleft()
    with pytest.raises(WorkerFailed, match="no step") as raised:
        pending.result()
    assert raised.value.rank == 2


def test_a_failure_after_a_steps_result_is_passed_to_late_failure(client, wire):
    reported = []
    client.late_failure = reported.append
    client.step(StepPlan(7, freed_slots=[1]), 5.0).result()
    assert not reported
    call(client, "who").result()
    assert [error.rank for error in reported] == [1]


MASKS = GrammarOutput(bytes(4), bytes(4), b"mask")


def sample_apart(worker, log):
    """Make a worker one that samples in a call of its own."""

    class Apart(Worker):
        def execute_model(self, plan):
            if super().execute_model(plan) is not None:
                log.append(("execute", self.rank))

        def sample_tokens(self, grammar):
            log.append(("sample", self.rank, grammar))
            return StepResult(1) if self.rank == 0 else None

    worker.__class__ = Apart


@pytest.mark.parametrize("is_aggregated", [False, True])
def test_masks_follow_a_masked_step_and_its_replies_come_after_them(client, wire, is_aggregated):
    log = []
    for worker in wire.workers:
        sample_apart(worker, log)
    aggregate = (lambda results: results) if is_aggregated else None
    pending = client.step(StepPlan(1, masked=True), 5.0, aggregate)
    assert log == [("execute", 0)]
    assert not wire.replies
    assert call(client, "who").result() == [0, 1, 2]
    client.sample_tokens(pending, MASKS, 5.0)
    assert log[1:] == [("sample", rank, MASKS) for rank in range(3)]
    assert len(wire.replies) == (3 if is_aggregated else 1)
    assert pending.result() == ([StepResult(1), None, None] if is_aggregated else StepResult(1))
    assert call(client, "who").result() == [0, 1, 2], "replies belong to their calls"


@pytest.mark.parametrize("rank", [0, 1])
def test_masks_of_a_step_that_has_failed_are_dropped(client, wire, rank):
    log = []
    for worker in wire.workers:
        sample_apart(worker, log)
    pending = client.step(StepPlan(1, freed_slots=[rank], masked=True), 5.0)
    client.sample_tokens(pending, MASKS, 5.0)
    assert ("sample", rank, MASKS) not in log
    with pytest.raises(WorkerFailed, match="no step") as raised:
        pending.result()
    assert raised.value.rank == rank


def test_a_failure_while_sampling_fails_the_step(client, wire):
    log = []
    for worker in wire.workers:
        sample_apart(worker, log)
    pending = client.step(StepPlan(1, masked=True), 5.0)
    wire.workers[0].sample_tokens = lambda grammar: 1 / 0
    client.sample_tokens(pending, MASKS, 5.0)
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        pending.result()


def test_a_closed_transport_ends_calls_with_its_reason(client, wire):
    pending = call(client, "who")
    wire.is_closed = True
    with pytest.raises(EngineDeadError, match="it was closed"):
        pending.result()
    with pytest.raises(EngineDeadError, match="it was closed"):
        call(client, "who")


def test_stop_shuts_the_workers_down(client, wire):
    client.stop(5.0)
    assert all(worker.is_shut_down for worker in wire.workers)
    assert all(server.stopped for server in wire.servers)
    assert not wire.replies


def test_a_request_too_short_to_read_is_an_error_of_the_step(wire):
    reply = wire.servers[0].handle(bytes([STEP]) + bytes(8) + b"\xff")
    assert reply is not None
    assert b"ValidationError" in reply


class Later:
    """A step that the device finishes when it is told to."""

    def __init__(self, step, error=None):
        self.step, self.error, self.is_over = step, error, False

    def done(self):
        if self.error is not None:
            raise self.error
        return self.is_over

    def result(self, timeout=None):
        if self.error is not None:
            raise self.error
        assert self.is_over
        return StepResult(self.step)


def test_replies_to_unfinished_steps_come_when_the_device_has_finished(wire, client):
    worker, server = wire.workers[0], wire.servers[0]
    launched = []
    worker.execute_model = lambda plan: launched.append(Later(plan.step)) or launched[-1]
    first, second = client.step(StepPlan(1), 5.0), client.step(StepPlan(2), 5.0)
    assert call(client, "who", reply_rank=0).result() == 0  # calls don't wait for steps
    assert server.has_unfinished
    assert not server.is_due()
    launched[1].is_over = True
    assert not server.is_due()  # steps finish in order
    launched[0].is_over = True
    assert server.is_due()
    wire.replies.extend((0, server.finish_step()) for _ in range(2))
    assert not server.has_unfinished
    assert (first.result().step, second.result().step) == (1, 2)


def test_a_step_that_fails_on_the_device_is_a_failed_step(wire, client):
    wire.workers[0].execute_model = lambda plan: Later(plan.step, RuntimeError("an illegal memory access"))
    step = client.step(StepPlan(1), 5.0)
    assert wire.servers[0].is_due()
    wire.replies.append((0, wire.servers[0].finish_step()))
    with pytest.raises(WorkerFailed, match="an illegal memory access"):
        step.result()


def test_a_worker_that_does_not_reply_finishes_its_steps_without_a_message(wire, client):
    later = Later(1)
    later.is_over, later.result = True, lambda timeout=None: None
    wire.workers[1].execute_model = lambda plan: later
    client.step(StepPlan(1), 5.0).result()
    assert wire.servers[1].finish_step() is None


# ---- steps to which all workers reply


def merge(results):
    """The result of worker 0, with what failed on any worker."""
    failed = [each for result in results if result is not None for each in result.failed]
    return StepResult(results[0].step, failed=failed)


def test_a_step_with_an_aggregate_has_a_reply_from_every_worker(wire, client):
    wire.workers[2].execute_model = lambda plan: StepResult(plan.step, failed=[(0, "no block")])
    seen = []
    pending = client.step(StepPlan(7), 5.0, lambda results: seen.append(results) or merge(results))
    assert len(wire.replies) == 3
    assert pending.result() == pending.result() == StepResult(7, failed=[(0, "no block")])
    (results,) = seen
    assert [result and result.step for result in results] == [7, None, 7]


def test_an_aggregated_step_is_done_when_the_last_worker_has_replied(wire, client):
    pending = client.step(StepPlan(7), 5.0, merge)
    last = wire.replies.pop()
    assert not pending.done()
    wire.replies.append(last)
    assert pending.done()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failure_of_any_worker_fails_an_aggregated_step(wire, client, rank):
    pending = client.step(StepPlan(7, freed_slots=[rank]), 5.0, merge)
    with pytest.raises(WorkerFailed, match="no step") as raised:
        pending.result()
    assert raised.value.rank == rank
    assert client.step(StepPlan(8), 5.0, merge).result().step == 8


def test_workers_reply_to_an_aggregated_step_when_their_devices_have_finished(wire, client):
    later = {rank: Later(7) for rank in range(3)}
    for rank, worker in enumerate(wire.workers):
        worker.execute_model = lambda plan, rank=rank: later[rank]
    later[1].result = lambda timeout=None: None  # as a worker whose result another one reports
    pending = client.step(StepPlan(7), 5.0, merge)
    for rank in (2, 1, 0):
        assert not pending.done()
        later[rank].is_over = True
        assert wire.servers[rank].is_due()
        wire.replies.append((rank, wire.servers[rank].finish_step()))
    assert pending.result().step == 7


def test_an_aggregate_that_raises_is_the_callers_error(client):
    def refuse(results):
        raise LookupError("nothing to merge")

    with pytest.raises(LookupError, match="nothing to merge"):
        client.step(StepPlan(7), 5.0, refuse).result()
    assert call(client, "who").result() == [0, 1, 2]


# ---- callbacks


def test_a_callback_runs_once_on_the_thread_that_notices_the_end(client):
    told = []
    pending = call(client, "who")
    pending.add_done_callback(lambda done: told.append((done, threading.current_thread())))
    assert told == []
    waiting = threading.Thread(target=pending.result)
    waiting.start()
    waiting.join()
    assert told == [(pending, waiting)]
    assert pending.done()
    pending.result()
    assert len(told) == 1


def test_a_callback_of_a_call_that_is_done_runs_at_once(client):
    pending = call(client, "who")
    pending.result()
    told = []
    pending.add_done_callback(told.append)
    assert told == [pending]


def test_waiting_for_a_later_call_runs_the_callbacks_of_earlier_ones(client):
    told = []
    for number in range(3):
        call(client, "who").add_done_callback(lambda done, number=number: told.append((number, done.result())))
    call(client, "who").result()
    assert told == [(number, [0, 1, 2]) for number in range(3)]


def test_callbacks_run_after_failures_and_timeouts_and_the_end(client, wire):
    told = []
    failing, late = call(client, "fail", 1), call(client, "who", timeout_s=0.01)
    failing.add_done_callback(told.append)
    late.add_done_callback(told.append)
    with pytest.raises(WorkerFailed):
        failing.result()
    wire.replies.clear()
    with pytest.raises(RpcTimeout):
        late.result()
    closed = call(client, "who")
    closed.add_done_callback(told.append)
    wire.is_closed = True
    assert closed.done()
    assert told == [failing, late, closed]


def test_a_callback_may_make_calls(client):
    found = []
    pending = call(client, "who")
    pending.add_done_callback(lambda done: found.append(call(client, "add", 2).result()))
    assert pending.result() == [0, 1, 2]
    assert found == [[2, 2, 2]]


def test_a_callback_that_raises_is_logged_and_stops_no_other_callback(client, caplog):
    told = []
    pending = call(client, "who")
    pending.add_done_callback(lambda done: 1 / 0)
    pending.add_done_callback(told.append)
    assert pending.result() == [0, 1, 2]
    assert told == [pending]
    assert "ZeroDivisionError" in caplog.text
