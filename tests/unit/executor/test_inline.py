"""The executor without processes."""

import os
import re
import sys

import msgspec
import pytest
from configs import make_config

from raycore.errors import EngineDeadError, InitializationError, WorkerFailed, WorkerRefused
from raycore.executor.inline import InlineExecutor
from raycore.messages import StepPlan, StepResult
from raycore.worker.rank import RankIdentity


class Worker:
    def __init__(self, config, rank):
        self.rank = rank
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))

    def determine_available_memory(self):
        return 5

    def execute_model(self, plan):
        if plan.step < 0:
            raise ValueError("no such step")
        return StepResult(plan.step)


class Recording(Worker):
    def load_model(self):
        self.plans = []

    def execute_model(self, plan):
        self.plans.append(plan)
        return StepResult(plan.step, is_anyone_busy=False)


class Broken(Worker):
    def load_model(self):
        raise OSError("no such file")


class Aggregator:
    def aggregate(self, outputs, output_rank=0):
        return outputs, output_rank


class Device(Worker):
    """Starts steps, and finishes them when it is told to."""

    def execute_model(self, plan):
        self.launched = Later(plan.step)
        return self.launched


class Later:
    def __init__(self, step):
        self.step, self.is_over = step, False

    def done(self):
        return self.is_over

    def result(self, timeout=None):
        self.is_over = True
        return StepResult(self.step)


def make_executor(worker_cls, **parallel):
    config = make_config()
    path = f"{__name__}.{worker_cls.__name__}"
    config = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, worker_cls=path, **parallel)
    )
    return InlineExecutor(config, RankIdentity(2, 4))


@pytest.fixture
def executor():
    executor = make_executor(Worker)
    executor.initialize()
    return executor


def test_the_inline_executor_initializes_its_worker_in_order(executor):
    executor.initialize_cache(9)
    calls = executor.collective_rpc(lambda worker: worker.calls)[0]
    assert calls == [("init_device",), ("load_model",), ("initialize_cache", 9), ("warm_up",)]
    rank = executor.collective_rpc(lambda worker: worker.rank, unique_reply_rank=0)
    assert (rank.dp_rank, rank.tp_rank, rank.tp_size, rank.num_local_workers) == (2, 0, 1, 4)


def test_the_inline_worker_knows_its_rank_in_the_expert_group():
    executor = make_executor(Worker, enable_expert_parallel=True, data_parallel_size=3)
    rendezvous = executor.rendezvous()
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", rendezvous)
    executor.initialize(rendezvous)
    rank = executor.collective_rpc(lambda worker: worker.rank, unique_reply_rank=0)
    assert (rank.ep_rank, rank.ep_size, rank.rendezvous) == (2, 3, rendezvous)


def test_a_dummy_batch_is_a_step_without_tokens():
    executor = make_executor(Recording)
    executor.initialize()
    assert executor.execute_dummy_batch().result() == StepResult(-1, is_anyone_busy=False)
    assert executor.collective_rpc(lambda worker: worker.plans, unique_reply_rank=0) == [StepPlan(-1)]
    with pytest.raises(WorkerRefused, match="method='plans': workers have no such method"):
        executor.collective_rpc("plans")


def test_collective_rpc_of_the_inline_executor_calls_the_worker_and_aggregates(executor):
    assert executor.determine_available_memory() == [5]
    assert executor.collective_rpc("determine_available_memory") == [5]
    given = {"kv_output_aggregator": Aggregator(), "unique_reply_rank": 0}
    assert executor.collective_rpc("determine_available_memory", **given) == ([5], 0)
    pending = executor.collective_rpc("determine_available_memory", non_block=True)
    assert pending.done()
    assert pending.result() == [5]
    assert executor.worker_pids() == [os.getpid()]
    executor.check_health()


def test_a_step_of_the_inline_executor_returns_its_result_or_its_failure(executor):
    assert executor.execute(StepPlan(3)).result().step == 3
    failed = executor.execute(StepPlan(-3))
    with pytest.raises(WorkerFailed, match="ValueError: no such step") as raised:
        failed.result()
    assert "in execute_model" in raised.value.traceback


def test_an_inline_worker_that_fails_to_start_raises_its_error():
    with pytest.raises(InitializationError, match="OSError: no such file") as raised:
        make_executor(Broken).initialize()
    assert isinstance(raised.value.__cause__, OSError)


def test_the_inline_executor_refuses_steps_after_shutdown(executor):
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError):
        executor.execute(StepPlan(1))


def test_the_inline_executors_module_imports_neither_ray_nor_torch():
    code = "import sys, raycore.executor.inline; sys.exit(any(name in sys.modules for name in ('ray', 'torch')))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_a_steps_result_may_be_aggregated(executor):
    executor.kv_output_aggregator = Aggregator()
    assert executor.execute(StepPlan(3)).result() == ([StepResult(3)], 0)
    on_device = make_executor(Device)
    on_device.initialize()
    on_device.kv_output_aggregator = Aggregator()
    assert on_device.execute(StepPlan(3)).result() == ([StepResult(3)], 0)


def test_callbacks_of_finished_steps_and_calls_run_at_once(executor):
    told = []
    executor.execute(StepPlan(3)).add_done_callback(lambda step: told.append(step.result().step))
    executor.collective_rpc("determine_available_memory", non_block=True).add_done_callback(
        lambda call: told.append(call.result())
    )
    assert told == [3, [5]]


@pytest.mark.parametrize("ask", ["done", "result"])
def test_callbacks_of_a_device_step_run_when_its_end_is_observed(ask):
    executor = make_executor(Device)
    executor.initialize()
    step = executor.execute(StepPlan(3))
    told = []
    step.add_done_callback(told.append)
    assert not step.done()
    assert told == []
    if ask == "done":
        executor.collective_rpc(lambda worker: setattr(worker.launched, "is_over", True))
        assert step.done()
        assert told == [step]
    assert step.result().step == 3
    assert step.done()
    assert told == [step]
