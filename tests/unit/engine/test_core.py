"""The engine's step and loop, with a fake executor: no Ray, no torch."""

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from configs import make_config
from fake_executor import FakeExecutor, request, run_to_end, with_stages

from raycore.engine.core import EngineCore
from raycore.errors import InitializationError, InvalidConfig
from raycore.messages import EngineRequest, FinishedRequest
from raycore.sampling_params import SamplingParams


def test_each_stage_has_a_step_in_flight_and_one_more_waits():
    config = with_stages(make_config(), 2)
    core = EngineCore(config, FakeExecutor(max_concurrent_batches=config.max_steps_in_flight))
    for seq_id in range(6):
        core.submit(request(seq_id, max_tokens=9))
    assert {seq_id: len(tokens) for seq_id, tokens in run_to_end(core).items()} == dict.fromkeys(range(6), 9)
    assert core.executor.most_in_flight == 3
    plans = core.executor.plans
    assert all(plan.tokens is None for plan in plans), "the last stage tells the first one which tokens it has sampled"
    sizes = [len(plan.slots) // 4 for plan in plans]
    assert sum(sizes) == 6 * 9
    assert set(sizes[6:-6]) == {3}, "half of the requests at a time"


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_run_to_max_tokens_at_any_number_of_steps_in_flight(depth):
    core = EngineCore(make_config(), FakeExecutor(max_concurrent_batches=depth))
    for seq_id in range(5):
        core.submit(request(seq_id, max_tokens=seq_id + 1))
    assert {h: len(t) for h, t in run_to_end(core).items()} == {h: h + 1 for h in range(5)}
    assert core.executor.most_in_flight == depth


def test_aborted_requests_have_no_further_outputs():
    core = EngineCore(make_config(), FakeExecutor())
    core.submit(request(0, max_tokens=50))
    core.submit(request(1, max_tokens=2))
    core.step()
    core.abort([0])
    assert list(run_to_end(core)) == [1]


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_tell_how_long_requests_waited_for_their_first_step(monkeypatch, depth):
    clock = SimpleNamespace(**vars(time), now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("raycore.engine.core.time", clock)
    core = EngineCore(make_config(max_num_seqs=1), FakeExecutor(max_concurrent_batches=depth))
    for seq_id in range(3):
        core.submit(request(seq_id, max_tokens=3))
        clock.now_s += 1.0
    core.abort([1])
    queued: dict[int, float] = {}
    while core.has_work():
        outputs = core.step()
        if outputs is not None:
            queued |= dict(outputs.queued)
            assert [seq_id for seq_id, _ in outputs.queued] == [seq_id for seq_id, _ in outputs.started]
        clock.now_s += 1.0
    assert queued[0] == 3.0
    # it came 2 s after the first, which then ran for three steps
    assert queued[2] == 1.0 + 3 + (depth - 1)
    assert not core._arrived_s


def test_nothing_is_kept_of_a_request_that_fails_before_its_first_step(monkeypatch):
    core = EngineCore(make_config(max_num_seqs=1), FakeExecutor())
    core.submit(request(0, max_tokens=2))
    core.submit(request(1, max_tokens=2))
    update = core.scheduler.update

    def failing(plan, result):  # as if its keys and values couldn't be loaded
        core.scheduler.abort([1])
        outputs = update(plan, result)
        outputs.finished.append(FinishedRequest(1, "failed", "they were not loaded"))
        return outputs

    monkeypatch.setattr(core.scheduler, "update", failing)
    core.step()
    assert not core._arrived_s


@pytest.mark.parametrize("depth", [1, 2])
def test_the_load_has_the_mean_time_of_the_steps_that_only_decode(monkeypatch, depth):
    clock = SimpleNamespace(**vars(time), now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("raycore.engine.core.time", clock)
    executor = FakeExecutor(max_concurrent_batches=depth)
    compute, core = executor.result, EngineCore(make_config(), executor)

    def result(plan):
        clock.now_s += 0.5 if plan.new_requests else 0.02
        return compute(plan)

    executor.result = result
    core.submit(request(0, max_tokens=8))
    while core.load().num_running == 0:
        core.step()
    assert core.load().decode_s == 0.0
    run_to_end(core)
    # however many steps are in flight, each takes as long as the workers need
    assert core.load().decode_s == pytest.approx(0.02)


def test_too_little_memory_is_refused_with_the_numbers():
    executor = FakeExecutor(available=1024)
    with pytest.raises(InvalidConfig, match=r"16 tokens .*max_model_len=64"):
        EngineCore(make_config(max_model_len=64), executor)
    assert executor.is_shut_down


def test_a_failed_start_stops_the_workers():
    executor = FakeExecutor()
    executor.fail_with = InitializationError("no")
    with pytest.raises(InitializationError):
        EngineCore(make_config(), executor)
    assert executor.is_shut_down


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("broken", ["execute", "result"])
def test_a_step_that_raises_leaves_the_engines_state_in_the_log(monkeypatch, caplog, depth, broken):
    core = EngineCore(make_config(max_num_batched_tokens=16), FakeExecutor(max_concurrent_batches=depth))
    secrets = [99, 98, 97]
    core.submit(request(7))
    core.submit(EngineRequest(8, "b", secrets, SamplingParams(), seed=0))

    def fail(*_):
        raise ZeroDivisionError("in the model")

    monkeypatch.setattr(core.executor, broken, fail)
    with pytest.raises(ZeroDivisionError):
        run_to_end(core)
    (text,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "raycore.engine.core" and record.levelname == "ERROR"
    ]
    assert "failed with ZeroDivisionError" in text
    assert "plan of step 0: 2 requests, 7 tokens; 2 requests get a slot, 0 slots become free, 2 blocks" in text
    assert "seq_ids of the step: [7, 8]" in text
    assert "load: LoadView(num_waiting=0, num_running=2" in text
    assert "max_num_batched_tokens=16" in text
    assert "99, 98" not in text
    assert str(np.array(secrets, np.int32).tobytes())[2:-1] not in text


@pytest.mark.parametrize(("path", "expected"), [(None, [0, 1, 2, 3]), ("newest_first.NewestFirst", [3, 2, 1, 0])])
def test_a_custom_scheduler_decides_the_order_of_requests(path, expected):
    config = make_config(max_num_seqs=1)
    scheduler = msgspec.structs.replace(config.scheduler, scheduler_cls=path)
    core = EngineCore(msgspec.structs.replace(config, scheduler=scheduler), FakeExecutor())
    for seq_id in range(4):
        core.submit(request(seq_id))
    assert list(run_to_end(core)) == expected
    core.scheduler.check_integrity()


def test_a_scheduler_that_cannot_be_imported_fails_before_weights_are_loaded():
    config = make_config()
    scheduler = msgspec.structs.replace(config.scheduler, scheduler_cls="nowhere.Scheduler")
    executor = FakeExecutor()
    executor.initialize = lambda rendezvous: pytest.fail("the weights were loaded")
    with pytest.raises(InvalidConfig, match=r"scheduler_cls='nowhere.Scheduler' can't be imported .*No module named"):
        EngineCore(msgspec.structs.replace(config, scheduler=scheduler), executor)
    assert executor.is_shut_down
