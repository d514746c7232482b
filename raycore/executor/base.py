"""The interface between an engine and its workers.

`InlineExecutor` runs one worker in the engine's own process, and `RayExecutor` drives worker actors through channels.
The engine knows `Executor` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from raycore.config import ExecutorConfig
from raycore.messages import StepPlan, StepResult
from raycore.worker.rank import RankIdentity

DUMMY_STEP = -1
"""The step number of all dummy batches, which the scheduler knows nothing of."""

FailureCallback = Callable[[BaseException], None]
"""Called once, from any thread, with a `WorkerDied` or `WorkerFailed`."""

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The result of a call, which may not have arrived yet. The calls of one executor finish in order."""

    def done(self) -> bool:
        """Whether `result()` would return or raise at once."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result, at most `timeout` seconds (None: the configured default)."""
        ...


class WorkerCall(NamedTuple):
    """A call to make on every worker, and which result its caller gets."""

    method: str | Callable[..., Any]
    """A method's name, or a callable that gets the worker as its first argument."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply_rank: int | None
    """The only worker whose result is returned, alone. None: a list of all results, in rank order."""
    aggregate: Callable[[list[Any]], Any] | None
    """Applied to that list."""


class Executor(ABC):
    """The workers of one engine. Methods that vLLM has, too, do what they do there."""

    max_concurrent_batches: int
    """How many steps may be in flight. With 1, a step's result arrives before the next plan is sent."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._settings = config

    @abstractmethod
    def stand_by(self) -> None:
        """Start the processes and import what they need, before the rank is known.

        Raises:
            InitializationError: a process did not start.
        """

    @abstractmethod
    def adopt(self, identity: RankIdentity) -> None:
        """Become this rank, after `stand_by()` and before `initialize()`."""

    @abstractmethod
    def rendezvous(self) -> str:
        """An address, `tcp://host:port`, on worker 0's node at which the workers of all engines can meet.

        Raises:
            InitializationError: worker 0 did not start.
        """

    @abstractmethod
    def initialize(self, rendezvous: str | None = None) -> None:
        """Bring the workers up and load the model.

        Args:
            rendezvous: what dp_rank 0's `rendezvous()` returned, if engines share experts.

        Raises:
            InitializationError: with the first failing worker's own traceback. All processes are stopped again.
        """

    @abstractmethod
    def load_progress(self) -> float:
        """Share of the weights that has been read, 0 to 1. May be called from any thread during `initialize()`."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        """Start a step. At most `max_concurrent_batches` may be in flight; they finish in order.

        The pending result raises `WorkerDied`, `WorkerFailed` or `RpcTimeout`.
        """

    @abstractmethod
    def start_call(self, call: WorkerCall, timeout_s: float) -> Pending[Any]:
        """Start a call on every worker. Errors are those of `collective_rpc`."""

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Have `callback` called when a worker dies or fails outside of a call; at once if one already has."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise the workers' failure if there was one, or if they do not answer in time."""

    @abstractmethod
    def worker_pids(self) -> list[int]:
        """Process ids, in rank order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ask the workers to stop, wait, then kill them. Idempotent. May be called before `initialize()` is done."""

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
        """Call `method` on every worker: a method's name, or a callable that gets the worker as its first argument.

        Args:
            timeout: seconds until all replies have to be there. None: the configured default.
            non_block: return a `Pending` instead of the result.
            unique_reply_rank: return this worker's result alone, rather than a list of all.
            kv_output_aggregator: applied to the list of results, which is in rank order. Overrides
                `unique_reply_rank`.

        Raises:
            WorkerFailed: any worker raised, whether its result was wanted or not.
            WorkerDied: any worker's process ended.
            RpcTimeout: not all replied in time. Replies that arrive later are discarded.
        """
        reply_rank = unique_reply_rank if kv_output_aggregator is None else None
        call = WorkerCall(method, tuple(args), kwargs or {}, reply_rank, kv_output_aggregator)
        pending = self.start_call(call, self._settings.execute_timeout_s if timeout is None else timeout)
        return pending if non_block else pending.result()

    def execute_dummy_batch(self) -> Pending[StepResult]:
        """Start a step without tokens, which the engines that share experts with this one need."""
        return self.execute(StepPlan(DUMMY_STEP))

    def determine_available_memory(self) -> int:
        """Bytes left for the KV cache on the worker that has the least."""
        return min(self.collective_rpc("determine_available_memory", self._settings.init_timeout_s))

    def bytes_per_block(self) -> int:
        """Bytes of one block on the worker where it takes the most."""
        return max(self.collective_rpc("bytes_per_block"))

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and warm the model up."""
        self.collective_rpc("initialize_cache", self._settings.init_timeout_s, (num_blocks,))
        self.collective_rpc("warm_up", self._settings.init_timeout_s)

    def dtype_name(self) -> str:
        """What the workers compute in: `dtype="auto"` is decided by them."""
        return self.collective_rpc("dtype_name")[0]
