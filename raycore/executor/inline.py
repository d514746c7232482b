"""`InlineExecutor`: one worker, in the engine's own process. Does not use Ray.

A call runs in the caller's thread, and is over when it returns. Only a GPU computes a step in the background.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from raycore.config import EngineConfig
from raycore.errors import EngineDeadError, InitializationError, RpcTimeout, WorkerFailed
from raycore.executor.base import Executor, FailureCallback, WorkerCall
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.node import listeners
from raycore.node.niceness import run_yielding
from raycore.rpc.pending import Callback, Finished, Pending, PendingCall, run_callbacks
from raycore.rpc.worker_methods import call_method, told_by_worker, worker_error
from raycore.rpc.worker_steps import StepReturn, WorkerSteps, takes_masks
from raycore.system import (
    futures,
    os,
)
from raycore.worker.protocol import WorkerProtocol
from raycore.worker.rank import RankIdentity, WorkerRank, load_worker_class, preload_worker

_Aggregate = Callable[[list[StepResult | None]], StepResult]


class Launched:
    """A `PendingCall` of a step that the device computes."""

    def __init__(self, step: Pending[StepResult | None], aggregate: _Aggregate | None) -> None:
        self._step = step
        self._aggregate = aggregate
        self._callbacks: deque[Callback] = deque()

    def done(self) -> bool:
        """Whether the device has finished the step."""
        is_done = self._is_done()
        if is_done:
            run_callbacks(self, self._callbacks)
        return is_done

    def add_done_callback(self, callback: Callback) -> None:
        self._callbacks.append(callback)
        self.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step's result, at most `timeout` seconds.

        Raises:
            RpcTimeout: the device hasn't finished in time.
            WorkerFailed: the step failed on the device.
        """
        try:
            result = self._step.result(timeout)
        except (TimeoutError, futures.TimeoutError) as error:  # Python 3.10 has both
            raise RpcTimeout(f"a step timed out: {error}") from error
        except Exception as error:  # the device's libraries may raise anything
            raise _failure(error) from error
        finally:
            self.done()
        if self._aggregate is not None:
            return self._aggregate([result])
        assert result is not None, "the only worker reports its steps"
        return result

    def _is_done(self) -> bool:
        try:
            return self._step.done()
        except Exception:  # the device has failed: result() reports it
            return True


class InlineExecutor(Executor):
    """An executor that runs each call in the caller's thread. Timeouts apply only to what a device computes."""

    def __init__(self, config: EngineConfig, identity: RankIdentity, host: str = "127.0.0.1") -> None:
        """Store the arguments. Starts nothing, and does not import torch.

        Args:
            host: the address at which the workers of other engines reach this process.
        """
        super().__init__(config.executor)
        assert config.parallel.world_size == 1, "one process runs one worker"
        self._config = config
        self._identity = identity
        self._host = host
        self._worker: WorkerProtocol | None = None
        self._steps = WorkerSteps(None)
        self.max_concurrent_batches = config.max_steps_in_flight

    def stand_by(self) -> None:
        run_yielding(lambda: preload_worker(self._config))

    def adopt(self, identity: RankIdentity) -> None:
        self._identity = identity

    def rendezvous(self) -> str:
        return listeners.offer(self._host)

    def initialize(self, rendezvous: str | None = None, *, is_new: bool = False) -> None:
        identity = self._identity
        alone = WorkerRank(
            identity.dp_rank, 0, 1, 0, identity.num_local_workers, gpu_id=identity.gpu_of(0), is_new=is_new
        )
        rank = alone.with_experts(self._config.parallel, rendezvous)
        rank.take_gpu()
        try:
            worker = self._worker = load_worker_class(self._config.parallel)(self._config, rank)
            self._steps, self.takes_masks = WorkerSteps(worker), takes_masks(worker)
            worker.init_device()
            if not is_new:
                worker.load_model()
        except Exception as error:  # workers may raise anything; executors raise InitializationError
            self.shutdown()
            raise InitializationError(f"the worker failed while starting: {type(error).__name__}: {error}") from error

    def load_progress(self) -> float:
        return getattr(self._worker, "load_progress", 0.0)

    def execute(self, plan: StepPlan) -> PendingCall[StepResult]:
        self._ready()
        try:
            result = self._steps.execute(plan)
        except Exception as error:  # workers may raise anything; executors raise WorkerFailed
            return Finished(None, _failure(error))
        return Finished(None) if plan.masked else self._pending(result)

    def sample_tokens(self, step: PendingCall[StepResult], grammar: GrammarOutput) -> PendingCall[StepResult]:
        self._ready()
        if not self._steps.is_masked:
            return step  # it has failed
        try:
            return self._pending(self._steps.sample(grammar))
        except Exception as error:  # workers may raise anything; executors raise WorkerFailed
            return Finished(None, _failure(error))

    def _pending(self, result: StepReturn) -> PendingCall[StepResult]:
        aggregate = self._step_aggregate
        if result is not None and not isinstance(result, StepResult):
            return Launched(result, aggregate)
        return Finished(result if aggregate is None else aggregate([result]))

    def start_call(self, call: WorkerCall, timeout_s: float) -> Finished[Any]:
        worker = self._ready()

        def run() -> Any:
            if isinstance(call.method, str):
                value = call_method(worker, call.method, call.args, call.kwargs)
            else:
                value = call.method(worker, *call.args, **call.kwargs)
            if call.reply_rank is not None:
                return value
            return [value] if call.aggregate is None else call.aggregate([value])

        return self._run(run)

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Never calls `callback`: this worker can only fail in a call."""

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def worker_pids(self) -> list[int]:
        """The id of this process, which hosts the worker."""
        return [os.getpid()]

    def shutdown(self) -> None:
        worker, self._worker, self._steps = self._worker, None, WorkerSteps(None)
        if worker is not None:
            worker.shutdown()

    def _ready(self) -> WorkerProtocol:
        if self._worker is None:
            raise EngineDeadError("the executor has no worker: it was shut down or never initialized")
        return self._worker

    @staticmethod
    def _run(function: Callable[..., Any], *args: Any) -> Finished[Any]:
        try:
            return Finished(function(*args))
        except Exception as error:  # workers may raise anything; executors raise WorkerFailed
            return Finished(None, _failure(error))


def _failure(error: Exception) -> WorkerFailed:
    """The error that executors raise, made while `error` is handled."""
    failure = worker_error(0, *told_by_worker(error, traceback.format_exc()))
    failure.__cause__ = error
    return failure
