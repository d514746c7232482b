"""The loop of an engine, with a fake executor: what commands do, what clients hear, and how the loop ends."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest
from configs import make_config
from fake_executor import FakeExecutor, request, run_to_end
from waiting import LONG_S

from raycore.engine.core import EngineCore
from raycore.engine.decoding import decode_requests
from raycore.engine.loop import apply_command, release_prepared, run_loop
from raycore.engine.mailbox import Abort, ForgetClient, Mailbox, Submit, Utility
from raycore.errors import InvalidInput, WorkerDied
from raycore.messages import NO_LOAD, LoadView, OutputBatch, first_seq_id


def started_loop(core: EngineCore, mailbox: Mailbox) -> Future:
    ended: Future = Future()

    def run():
        try:
            ended.set_result(run_loop(core, mailbox))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended


def test_the_engine_loop_serves_and_refuses_requests_and_stops():
    core, mailbox = EngineCore(make_config(max_model_len=64), FakeExecutor()), Mailbox()
    ended = started_loop(core, mailbox)
    mailbox.put(Submit([request(0, prompt=1000), request(1)]))
    finished = {}
    for data in mailbox.outputs(0):
        finished |= {f.seq_id: f for f in msgspec.msgpack.decode(data, type=OutputBatch).finished}
        if len(finished) == 2:
            break
    assert finished[0].finish_reason == "error"
    assert "1000" in finished[0].stop_reason
    assert finished[1].finish_reason == "length"
    mailbox.stop()
    assert ended.result(LONG_S) is None


def test_a_request_that_fails_before_its_first_step_no_longer_counts_as_waiting():
    core = SimpleNamespace(
        release_prepared=lambda: {first_seq_id(0): "its adapter can't be read"}, load=lambda: NO_LOAD
    )
    mailbox = Mailbox()
    mailbox.note_load(LoadView(1, 0, 0.0))
    release_prepared(core, mailbox)  # type: ignore[arg-type]
    batch = msgspec.msgpack.decode(next(mailbox.outputs(0)), type=OutputBatch)
    assert batch.finished[0].finish_reason == "failed"
    assert batch.load == NO_LOAD


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("request_id", 5, "Expected `str`, got `int`"),
        ("priority", 1.5, "Expected `int`, got `float`"),
        ("prompt_token_ids", [1, "a"], "Expected `int`, got `str`"),
        ("params", {"max_tokens": -1}, "Expected `int` >= 1"),
        ("params", {"stop": [""]}, "stop contains '': every entry must be a non-empty string"),
    ],
)
def test_a_request_that_cannot_be_decoded_fails_alone(field, value, named):
    core, mailbox = EngineCore(make_config(max_model_len=64), FakeExecutor()), Mailbox()
    ended = started_loop(core, mailbox)
    broken = msgspec.structs.replace(request(1), **{field: value})
    message = msgspec.msgpack.encode([request(0), broken, request(2)])
    mailbox.put(Submit(*decode_requests(message)))
    finished = {}
    for data in mailbox.outputs(0):
        finished |= {f.seq_id: f for f in msgspec.msgpack.decode(data, type=OutputBatch).finished}
        if len(finished) == 3:
            break
    assert [finished[seq_id].finish_reason for seq_id in range(3)] == ["length", "failed", "length"]
    assert named in finished[1].stop_reason
    mailbox.stop()
    assert ended.result(LONG_S) is None


def test_requests_of_a_forgotten_client_are_aborted_and_its_later_ones_ignored():
    core, mailbox = EngineCore(make_config(max_model_len=64), FakeExecutor()), Mailbox()
    gone, other = first_seq_id(3), first_seq_id(4)
    for command in (
        Submit([request(gone), request(other, max_tokens=50)]),
        ForgetClient(3),
        Submit([request(gone + 1), request(other + 1)]),
    ):
        apply_command(command, core, mailbox)
    assert list(run_to_end(core)) == [other, other + 1]
    core.scheduler.check_integrity()


def test_what_a_request_waits_for_the_step_that_runs_when_it_comes_is_queue_time(monkeypatch):
    core, mailbox = EngineCore(make_config(), FakeExecutor()), Mailbox()
    command = Submit([request(0)], arrived_s=10.0)
    when_the_step_has_ended = SimpleNamespace(monotonic=lambda: 12.5)
    monkeypatch.setattr("raycore.engine.core.time", when_the_step_has_ended)
    apply_command(command, core, mailbox)
    outputs = core.step()
    assert outputs is not None
    assert outputs.queued == [(0, 2.5)]


def test_clients_are_sent_a_load_that_changes_without_an_output(monkeypatch):
    monkeypatch.setattr("raycore.engine.mailbox.IDLE_CHECK_S", 0.01)
    core, mailbox = EngineCore(make_config(max_model_len=64), FakeExecutor()), Mailbox()
    other = mailbox.outputs(1)
    core.submit(request(0))
    mailbox.note_load(core.load())
    assert msgspec.msgpack.decode(next(other), type=OutputBatch).load.num_waiting == 1
    mailbox.put(Abort([0]))
    ended = started_loop(core, mailbox)
    while msgspec.msgpack.decode(next(other), type=OutputBatch).load.num_waiting:
        pass
    mailbox.stop()
    assert ended.result(LONG_S) is None


def test_the_engine_loop_raises_the_failure_reported_to_its_mailbox():
    core, mailbox = EngineCore(make_config(), FakeExecutor()), Mailbox()
    ended = started_loop(core, mailbox)
    mailbox.fail(WorkerDied(0, 1, "n", "killed"))
    with pytest.raises(WorkerDied):
        ended.result(LONG_S)


def test_the_engine_loop_raises_the_error_of_a_failed_step():
    core, mailbox = EngineCore(make_config(), FakeExecutor()), Mailbox()
    core.executor.fail_with = ZeroDivisionError("in the model")
    ended = started_loop(core, mailbox)
    mailbox.put(Submit([request(0)]))
    with pytest.raises(ZeroDivisionError):
        ended.result(LONG_S)


def test_a_utility_that_raises_fails_its_call_and_not_the_engine_loop():
    core, mailbox = EngineCore(make_config(), FakeExecutor()), Mailbox()
    ended = started_loop(core, mailbox)

    def call(method, *args):
        command = Utility(method, args, {})
        mailbox.put(command)
        return command.reply.result(LONG_S)

    assert call("reset_prefix_cache") is True
    # lists that crossed a wire become the tuples that the signature asks for
    assert call("collective_rpc", "ping", None, [1, 2]) == [("ping", (1, 2))]
    with pytest.raises(InvalidInput, match=r"no method 'shutdown'.*collective_rpc"):
        call("shutdown")
    with pytest.raises(InvalidInput, match="timeout='soon'"):
        call("collective_rpc", "ping", "soon")
    with pytest.raises(InvalidInput, match="argument"):
        call("reset_prefix_cache", True, True, 1)
    mailbox.put(Abort([99]))
    mailbox.stop()
    ended.result(LONG_S)
