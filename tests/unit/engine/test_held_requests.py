"""Requests are held while their grammars are compiled, and others go on: a whole engine with a fake executor."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest
from configs import make_config
from fake_executor import FakeExecutor, request, run_to_end
from test_loop import started_loop
from waiting import LONG_S

from raycore.engine.core import EngineCore
from raycore.engine.mailbox import Abort, Mailbox, Submit
from raycore.messages import EngineRequest, OutputBatch
from raycore.parts.constraints import engine as grammars
from raycore.parts.experts.engine.lockstep import run_lockstep_loop
from raycore.parts.experts.engine.waves import Waves
from raycore.structured_outputs import StructuredOutputsParams


class CompilingExecutor(FakeExecutor):
    """Two workers, each of which says of every call what it has been told and has not done."""

    def __init__(self, depth: int = 1):
        super().__init__(max_concurrent_batches=depth)
        self.under_way: list[set[int]] = [set(), set()]
        self.asked: dict[int, StructuredOutputsParams] = {}
        self.dropped: list[int] = []
        self.answers = True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        assert method == "prepare_grammars"
        assert non_block
        asked, dropped = args
        self.asked |= asked
        self.dropped += dropped
        for each in self.under_way:
            each.difference_update(dropped)
            each.update(asked)
        return SimpleNamespace(done=lambda: self.answers, result=lambda: [list(each) for each in self.under_way])

    def finish(self, worker: int, seq_id: int) -> None:
        self.under_way[worker].discard(seq_id)


def constrained(seq_id: int) -> EngineRequest:
    asked = StructuredOutputsParams(regex=f"number {seq_id}")
    made = request(seq_id)
    made.params = msgspec.structs.replace(made.params, structured_outputs=asked)
    return made


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_is_held_until_all_workers_have_its_grammar_while_others_run(depth):
    executor = CompilingExecutor(depth)
    core = EngineCore(make_config(), executor)
    core.submit(constrained(1))
    core.submit(request(2))
    core.release_prepared()
    assert {seq_id: asked.regex for seq_id, asked in executor.asked.items()} == {1: "number 1"}
    assert (core.load().num_waiting, core.load().num_deferred) == (2, 1)
    assert list(run_to_end(core)) == [2]
    for worker in range(2):
        core.release_prepared()
        assert not core.has_work(), "a worker isn't ready"
        assert core.idle_wait_s() < 0.1
        executor.finish(worker, 1)
    core.release_prepared()
    assert len(run_to_end(core)[1]) == 3
    assert core.idle_wait_s() == 1.0
    core.scheduler.check_integrity()


def test_busy_workers_are_asked_once_to_prepare_grammars():
    executor = CompilingExecutor()
    core = EngineCore(make_config(), executor)
    executor.answers = False
    core.submit(constrained(1))
    core.release_prepared()
    core.submit(constrained(2))
    core.release_prepared()
    assert list(executor.asked) == [1], "the answer to the first call is still to come"
    executor.finish(0, 1), executor.finish(1, 1)
    executor.answers = True
    core.release_prepared()
    assert list(run_to_end(core)) == [1]
    core.release_prepared()
    assert list(executor.asked) == [1, 2]
    executor.finish(0, 2), executor.finish(1, 2)
    core.release_prepared()
    assert list(run_to_end(core)) == [2]


def test_released_requests_start_in_their_order_of_arrival():
    executor = CompilingExecutor()
    core = EngineCore(make_config(max_num_seqs=1), executor)
    for made in (constrained(1), request(2), request(3)):
        core.submit(made)
    core.release_prepared()
    core.step()
    executor.finish(0, 1), executor.finish(1, 1)
    core.release_prepared()
    assert list(run_to_end(core)) == [2, 1, 3]


def test_an_aborted_held_request_never_starts():
    executor = CompilingExecutor()
    core = EngineCore(make_config(), executor)
    core.submit(constrained(1))
    core.submit(constrained(2))
    core.abort([1])
    core.release_prepared()
    assert list(executor.asked) == [2]
    core.abort([2])
    core.release_prepared()
    assert executor.dropped == [2], "no worker was told of the first"
    assert core.load().num_waiting == 0
    assert core.idle_wait_s() == 1.0
    core.scheduler.check_integrity()
    core.submit(request(2))
    assert list(run_to_end(core)) == [2]


def test_busy_workers_are_told_of_an_abort_once_they_answer():
    executor = CompilingExecutor()
    core = EngineCore(make_config(), executor)
    executor.answers = False
    core.submit(constrained(1))
    core.release_prepared()
    core.abort([1])
    core.release_prepared()
    assert executor.dropped == []
    assert core.idle_wait_s() < 0.1
    executor.answers = True
    core.release_prepared()
    core.release_prepared()
    assert executor.dropped == [1]
    assert core.idle_wait_s() == 1.0
    core.submit(constrained(1))
    core.release_prepared()
    assert core.load().num_deferred == 1
    assert executor.dropped == [1]


def test_a_request_is_held_no_longer_than_the_grammar_timeout(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(grammars, "time", clock)
    core = EngineCore(make_config(), CompilingExecutor())
    core.submit(constrained(1))
    core.release_prepared()
    clock.now_s = grammars.GRAMMAR_TIMEOUT_S + 1
    core.release_prepared()
    assert list(run_to_end(core)) == [1]


def lockstep_loop(core: EngineCore, mailbox: Mailbox):
    return ThreadPoolExecutor(1).submit(run_lockstep_loop, core, mailbox, Waves(), lambda wave: None)


@pytest.mark.parametrize("loop", [started_loop, lockstep_loop])
def test_the_plain_and_the_lockstep_loop_hold_and_release_requests(loop):
    executor = CompilingExecutor()
    core, mailbox = EngineCore(make_config(), executor), Mailbox()
    executor.execute_dummy_batch = lambda: SimpleNamespace(result=lambda timeout: SimpleNamespace(is_anyone_busy=False))
    ended = loop(core, mailbox)
    mailbox.put(Submit([constrained(1), constrained(2), request(3)]))
    outputs = (msgspec.msgpack.decode(data, type=OutputBatch) for data in mailbox.outputs(0))
    finished = (end.seq_id for batch in outputs for end in batch.finished)
    assert next(finished) == 3
    mailbox.put(Abort([2]))
    executor.finish(0, 1), executor.finish(1, 1)
    assert next(finished) == 1
    mailbox.stop()
    ended.result(LONG_S)
