"""The seam between an engine and its workers.

An engine sees this protocol alone: `InlineExecutor` runs one worker in the engine's own process, `RayExecutor` drives
worker actors through channels, and tests bring fakes of a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from raycore.messages import StepPlan, StepResult

FailureCallback = Callable[[BaseException], None]
"""Called once, from any thread, with a `WorkerDied` or `WorkerFailed`."""

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result that may not be there yet. Pending results of one executor are settled in the order of their calls."""

    def done(self) -> bool:
        """Whether `result()` would return or raise at once."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result, at most `timeout` seconds (None: the configured default)."""
        ...


class Executor(Protocol):
    """Workers, driven as one. Method names that vLLM has mean what they mean there."""

    ep_init: str | None
    """To be set before `initialize()` where engines share experts: what `ep_meeting()` of dp_rank 0's gave."""
    max_concurrent_batches: int
    """Steps that may be in flight at once: 1 means that a step's result comes before the next plan goes."""

    def stand_by(self) -> None:
        """Start the processes and import what they need, before it is known which rank this will be.

        Raises:
            InitializationError: that failed.
        """
        ...

    def adopt(self, dp_rank: int, num_local_workers: int) -> None:
        """After `stand_by()`: which rank this is, and how many workers share its node. `initialize()` comes next."""
        ...

    def ep_meeting(self) -> str:
        """Where the workers of all engines can meet, if this is dp_rank 0's: `tcp://host:port` on worker 0's node."""
        ...

    def initialize(self) -> None:
        """Bring the workers up and load the model.

        Raises:
            InitializationError: with the first failing worker's own traceback; everything started is stopped again.
        """
        ...

    def load_progress(self) -> float:
        """Share of the weights that has been read, 0 to 1. May be called from any thread, while `initialize()` runs."""
        ...

    def determine_available_memory(self) -> int:
        """Bytes that every worker has left for its share of the KV cache."""
        ...

    def bytes_per_block(self) -> int:
        """Bytes that one block takes on each worker."""
        ...

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and warm the model up."""
        ...

    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        """Start a step. At most `max_concurrent_batches` may be unfinished; they finish in order.

        The pending result raises `WorkerDied`, `WorkerFailed` or `RpcTimeout`.
        """
        ...

    def execute_dummy_batch(self) -> Pending[StepResult]:
        """Start a step without a token, for the sake of the engines that share experts with this one."""
        ...

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
        """Call `method` on every worker: a method's name, or a callable that gets the worker first.

        Args:
            timeout: seconds, over all replies together; None is the configured default.
            non_block: return a future instead of the result.
            unique_reply_rank: only this worker's result is returned, alone rather than in a list.
            kv_output_aggregator: applied to the list of results, in rank order.

        Raises:
            WorkerFailed: any worker raised, whether its result was wanted or not.
            WorkerDied: any worker's process ended.
            RpcTimeout: not all replied in time; what they reply later is discarded.
        """
        ...

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Have `callback` called when a worker dies or fails outside any call; at once if that has happened."""
        ...

    def check_health(self) -> None:
        """Raise the workers' failure if there was one, or if they don't answer in time."""
        ...

    def dtype_name(self) -> str:
        """What the workers compute in: `auto` decided."""
        ...

    def worker_pids(self) -> list[int]:
        """Process ids, in rank order."""
        ...

    def shutdown(self) -> None:
        """Ask the workers to stop, wait, then kill. Idempotent, and works half-initialised."""
        ...
