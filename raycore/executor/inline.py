"""`InlineExecutor`: one worker, in the engine's own process. Does not use Ray."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raycore.config import EngineConfig
from raycore.errors import EngineDeadError, InitializationError, WorkerFailed
from raycore.executor.base import Executor, FailureCallback, WorkerCall
from raycore.messages import StepPlan, StepResult
from raycore.node.niceness import run_yielding
from raycore.node.ports import address_of, free_ports
from raycore.worker.protocol import WorkerProtocol
from raycore.worker.rank import RankIdentity, WorkerRank, load_worker_class

T = TypeVar("T")


class Finished(Generic[T]):
    """A `Pending` that is already done, with a value or an error."""

    def __init__(self, value: T | None, error: WorkerFailed | None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self, timeout: float | None = None) -> T:
        """The value. Raises `WorkerFailed` if the call failed."""
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType]


class InlineExecutor(Executor):
    """An executor that runs each call synchronously in the caller's thread. Timeouts are ignored."""

    max_concurrent_batches = 1

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

    def stand_by(self) -> None:
        """See `Executor.stand_by`."""
        run_yielding(lambda: load_worker_class(self._config.parallel))

    def adopt(self, identity: RankIdentity) -> None:
        """See `Executor.adopt`."""
        self._identity = identity

    def rendezvous(self) -> str:
        """See `Executor.rendezvous`."""
        (port,) = free_ports(self._host, 1)
        return address_of(self._host, port)

    def initialize(self, rendezvous: str | None = None) -> None:
        """See `Executor.initialize`."""
        dp_rank, num_local_workers = self._identity.dp_rank, self._identity.num_local_workers
        alone = WorkerRank(dp_rank, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=num_local_workers)
        rank = alone.with_experts(self._config.parallel, rendezvous)
        try:
            worker = self._worker = load_worker_class(self._config.parallel)(self._config, rank)
            worker.init_device()
            worker.load_model()
        except Exception as error:  # workers may raise anything; executors raise InitializationError
            self.shutdown()
            raise InitializationError(f"the worker failed while starting: {type(error).__name__}: {error}") from error

    def load_progress(self) -> float:
        """See `Executor.load_progress`."""
        return getattr(self._worker, "load_progress", 0.0)

    def execute(self, plan: StepPlan) -> Finished[StepResult]:
        """See `Executor.execute`."""
        return self._run(self._ready().execute_model, plan)

    def start_call(self, call: WorkerCall, timeout_s: float) -> Finished[Any]:
        """See `Executor.start_call`."""
        worker = self._ready()

        def run() -> Any:
            if isinstance(call.method, str):
                value = getattr(worker, call.method)(*call.args, **call.kwargs)
            else:
                value = call.method(worker, *call.args, **call.kwargs)
            if call.reply_rank is not None:
                return value
            return [value] if call.aggregate is None else call.aggregate([value])

        return self._run(run)

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """See `Executor.register_failure_callback`. Never calls `callback`: this worker can only fail in a call."""

    def check_health(self) -> None:
        """See `Executor.check_health`."""
        self.collective_rpc("check_health")

    def worker_pids(self) -> list[int]:
        """The id of this process, which hosts the worker."""
        return [os.getpid()]

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _ready(self) -> WorkerProtocol:
        if self._worker is None:
            raise EngineDeadError("the executor has no worker: it was shut down or never initialized")
        return self._worker

    @staticmethod
    def _run(function: Callable[..., Any], *args: Any) -> Finished[Any]:
        try:
            return Finished(function(*args), None)
        except Exception as error:  # workers may raise anything; executors raise WorkerFailed
            text = f"{type(error).__name__}: {error}"
            failure = WorkerFailed(0, text, traceback.format_exc())
            failure.__cause__ = error
            return Finished(None, failure)
