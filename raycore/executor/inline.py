"""`InlineExecutor`: one worker, in the engine's own process. Knows no Ray."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from raycore.config import EngineConfig
from raycore.errors import EngineDeadError, InitializationError, WorkerFailed
from raycore.executor.base import FailureCallback
from raycore.executor.calls import CollectiveCalls
from raycore.messages import StepPlan, StepResult
from raycore.node.ports import address_of, free_ports
from raycore.worker.rank import WorkerRank, load_worker_class

T = TypeVar("T")


class Settled(Generic[T]):
    """A `Pending` whose result is there: a value, or the failure of getting it."""

    def __init__(self, value: T | None, error: WorkerFailed | None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        """Always."""
        return True

    def result(self, timeout: float | None = None) -> T:
        """The value. Raises `WorkerFailed`."""
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType]


class InlineExecutor(CollectiveCalls):
    """See `Executor`. A call runs at once in the caller's thread: no deadline interrupts it, and nothing dies alone."""

    max_concurrent_batches = 1

    def __init__(self, config: EngineConfig, dp_rank: int, num_local_workers: int, host: str = "127.0.0.1") -> None:
        """Nothing is started yet, and torch not imported.

        Args:
            host: where other engines' workers reach this process.
        """
        super().__init__(config.executor)
        assert config.parallel.world_size == 1, "one process runs one worker"
        self._config = config
        self._place = WorkerRank(dp_rank, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=num_local_workers)
        self._host = host
        self.ep_init: str | None = None
        self._worker: Any = None

    def stand_by(self) -> None:
        """See `Executor.stand_by`."""
        load_worker_class(self._config.parallel)

    def adopt(self, dp_rank: int, num_local_workers: int) -> None:
        """See `Executor.adopt`."""
        self._place = WorkerRank(dp_rank, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=num_local_workers)

    def ep_meeting(self) -> str:
        """See `Executor.ep_meeting`."""
        (port,) = free_ports(self._host, 1)
        return address_of(self._host, port)

    def initialize(self) -> None:
        """See `Executor.initialize`."""
        rank = self._place.with_experts(self._config.parallel, self.ep_init)
        try:
            worker = load_worker_class(self._config.parallel)(self._config, rank)
            self._worker = worker
            worker.init_device()
            worker.load_model()
        except Exception as error:  # whatever a worker raises; the executor's protocol has one error for it
            self.shutdown()
            raise InitializationError(f"the worker failed while starting: {type(error).__name__}: {error}") from error

    def load_progress(self) -> float:
        """See `Executor.load_progress`."""
        return getattr(self._worker, "load_progress", 0.0)

    def execute(self, plan: StepPlan) -> Settled[StepResult]:
        """See `Executor.execute`."""
        return self._run(self._ready().execute_model, plan)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """See `Executor.collective_rpc`."""
        worker = self._ready()

        def call() -> Any:
            function = getattr(worker, method) if isinstance(method, str) else method
            own = () if isinstance(method, str) else (worker,)
            value = function(*own, *args, **(kwargs or {}))
            if kv_output_aggregator is not None:
                return kv_output_aggregator([value])
            return [value] if unique_reply_rank is None else value

        settled: Settled[Any] = self._run(call)
        return settled if non_block else settled.result()

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """See `Executor`: the worker can only fail in a call, so there is nothing to call back for."""

    def check_health(self) -> None:
        """See `Executor.check_health`."""
        self.collective_rpc("check_health")

    def worker_pids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _ready(self) -> Any:
        if self._worker is None:
            raise EngineDeadError("the executor has no worker: it was shut down, or never initialized")
        return self._worker

    @staticmethod
    def _run(function: Callable[..., Any], *args: Any) -> Settled[Any]:
        try:
            return Settled(function(*args), None)
        except Exception as error:  # the outermost frame of whatever a worker does
            text = f"{type(error).__name__}: {error}"
            failure = WorkerFailed(0, text, traceback.format_exc())
            failure.__cause__ = error
            return Settled(None, failure)
