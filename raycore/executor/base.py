"""The interface between an engine and its workers.

`InlineExecutor` runs one worker in the engine's own process. `RayExecutor` calls worker actors through a transport. The
engine uses only `Executor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from raycore.activity import MemoryTag
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config import EngineConfig, ExecutorConfig
from raycore.messages import DUMMY_STEP, GrammarOutput, StepPlan, StepResult
from raycore.rpc.pending import PendingCall
from raycore.worker.rank import RankIdentity, Regrouping

FailureCallback = Callable[[BaseException], None]
"""Called at most once, on any thread, with a `WorkerDied` or `WorkerFailed`."""


class OutputAggregator(Protocol):
    """Makes one result of those of all workers. vLLM's `KVOutputAggregator` is one."""

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        """Return what the caller gets. `outputs` are the workers' results, in rank order.

        `output_rank`: the worker whose result the caller would get without an aggregator.
        """
        ...


class WorkerCall(NamedTuple):
    """A call to make on every worker, and how to combine the results."""

    method: str | Callable[..., Any]
    """The name of a worker's method, or a callable that takes the worker as its first argument."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply_rank: int | None
    """Return only this worker's result. None: return a list of all results, in rank order."""
    aggregate: Callable[[list[Any]], Any] | None
    """Applied to the list of all results. Its value is returned instead of the list."""


class Executor(ABC):
    """The workers of one engine. Methods that vLLM's executors have too behave as they do in vLLM."""

    max_concurrent_batches: int
    """How many steps may be in flight. With 1, the engine waits for a step's result before it sends the next plan."""
    takes_masks: bool = False
    """Whether the workers, which have started, can be given masks. Otherwise they follow grammars themselves."""
    kv_output_aggregator: OutputAggregator | None = None
    """If this is set, all workers reply to steps, and a step's result is what this makes of theirs. A worker that has
    no result of its own, as raycore's own on all ranks but one, gives None. Set it while no step is in flight."""

    def __init__(self, config: ExecutorConfig, output_rank: int = 0) -> None:
        """`output_rank`: the worker that returns the results of steps."""
        self._settings = config
        self._output_rank = output_rank

    @abstractmethod
    def stand_by(self) -> None:
        """For a standby: start the workers' processes and import the worker class, before the rank is known.

        Raises:
            InitializationError: a process did not start.
        """

    @abstractmethod
    def adopt(self, identity: RankIdentity) -> None:
        """Make a standby's workers those of rank `identity`. Called after `stand_by()` and before `initialize()`."""

    @abstractmethod
    def rendezvous(self) -> str:
        """An address `tcp://host:port` on worker 0's node, by which the workers of all engines can find each other.

        Another one with every call. After `initialize()`, any thread may call this.

        Raises:
            InitializationError: worker 0 did not start.
        """

    @abstractmethod
    def initialize(self, rendezvous: str | None = None, *, is_new: bool = False) -> None:
        """Start the workers and load the model.

        Args:
            rendezvous: what `rendezvous()` returned for one of the engines, if they share experts; otherwise None.
            is_new: load nothing, because `regroup()` will bring the weights from engines that already run.

        Raises:
            InitializationError: a worker failed. The message has the first failure's traceback. All workers' processes
                are stopped.
        """

    @abstractmethod
    def load_progress(self) -> float:
        """Fraction of the weights that has been read, 0 to 1. Any thread may call this during `initialize()`."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> PendingCall[StepResult]:
        """Start a step. At most `max_concurrent_batches` steps may be in flight; they finish in order.

        If the plan is masked, `sample_tokens` comes before anything else that is sent to the workers in steps.

        The pending result may raise `WorkerDied`, `WorkerFailed` or `RpcTimeout`.
        """

    def sample_tokens(self, step: PendingCall[StepResult], grammar: GrammarOutput) -> PendingCall[StepResult]:
        """Go on with a masked step: which tokens may come. Returns the step, whose result comes after that.

        `step`: what `execute` has returned.
        """
        raise NotImplementedError("these workers take no masks")

    @abstractmethod
    def start_call(self, call: WorkerCall, timeout_s: float) -> PendingCall[Any]:
        """Start a call on every worker. The pending result may raise the errors of `collective_rpc`."""

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Have `callback` called when a worker dies, or fails outside a call; at once if that has already happened."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise if a worker has failed or died, or if one does not answer in time."""

    def workers_answer(self) -> bool:
        """Whether all workers' processes answer within a second, whatever they compute. Any thread may call this."""
        return True

    @abstractmethod
    def worker_pids(self) -> list[int]:
        """The workers' process ids, in rank order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ask the workers to stop, wait up to `shutdown_timeout_s`, then kill them. Idempotent.

        May be called during `initialize()`.
        """

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: OutputAggregator | None = None,
    ) -> Any:
        """Call a method on every worker.

        Args:
            method: a method's name, or a callable that takes the worker as its first argument.
            timeout: seconds to wait for all replies. None: `execute_timeout_s`.
            non_block: return a `PendingCall` instead of the result.
            unique_reply_rank: return only this worker's result instead of a list of all results.
            kv_output_aggregator: makes the value to return of all results. It gets `unique_reply_rank`, or else 0, as
                its `output_rank`.

        Raises:
            WorkerFailed: a worker raised an exception, even if its result is not wanted.
            WorkerDied: a worker's process ended.
            RpcTimeout: a worker did not reply in time. Later replies are discarded.
        """
        reply_rank, aggregate = unique_reply_rank, None
        if kv_output_aggregator is not None:
            reply_rank, aggregate = None, partial(kv_output_aggregator.aggregate, output_rank=unique_reply_rank or 0)
        call = WorkerCall(method, tuple(args), kwargs or {}, reply_rank, aggregate)
        pending = self.start_call(call, self._settings.execute_timeout_s if timeout is None else timeout)
        return pending if non_block else pending.result()

    def execute_dummy_batch(self) -> PendingCall[StepResult]:
        """Start a step without tokens. In such a step this rank only computes experts for the other ranks' tokens."""
        return self.execute(StepPlan(DUMMY_STEP))

    def take_draft_token_ids(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        """Have the workers draft up to `num_tokens[i]` tokens for each slot. Returns the drafts.

        Raises: what `collective_rpc` raises.
        """
        return self.collective_rpc(
            "take_draft_token_ids", args=(slots, num_tokens), unique_reply_rank=self._output_rank
        )

    @property
    def _step_aggregate(self) -> Callable[[list[StepResult | None]], StepResult] | None:
        """What makes a step's result of those of all workers. None: only one worker replies."""
        aggregator = self.kv_output_aggregator
        return None if aggregator is None else partial(aggregator.aggregate, output_rank=self._output_rank)

    def determine_available_memory(self) -> list[int]:
        """Bytes available for the KV cache on each worker."""
        return self.collective_rpc("determine_available_memory", self._settings.init_timeout_s)

    def get_kv_cache_specs(self) -> list[WorkerCacheSpec]:
        """What each worker keeps in the blocks of the KV cache. A stage of a pipeline has only its own layers."""
        return self.collective_rpc("get_kv_cache_spec")

    def initialize_cache(self, cache: KVCacheConfig) -> None:
        """Allocate the KV cache on each worker, and warm up the model."""
        self.collective_rpc("initialize_cache", self._settings.init_timeout_s, (cache,))
        self.collective_rpc("warm_up", self._settings.init_timeout_s)

    def regroup(self, regrouping: Regrouping, config: EngineConfig) -> None:
        """Have the workers join another group that shares experts: see `Worker.regroup`. No step may be in flight.

        `config`: the configuration with the new number of ranks.
        """
        self.max_concurrent_batches = config.max_steps_in_flight
        self.collective_rpc("regroup", self._settings.init_timeout_s, (regrouping,))

    def sleep(self, level: int, tags: Sequence[MemoryTag]) -> None:
        """Have each worker give up memory: see `WorkerProtocol.sleep`."""
        self.collective_rpc("sleep", self._settings.init_timeout_s, (level, tags))

    def wake_up(self, tags: Sequence[MemoryTag], *, reads_weights: bool = True) -> None:
        """Have each worker get memory back that it gave up: see `WorkerProtocol.wake_up`."""
        # other classes of workers may know nothing of the second argument
        self.collective_rpc("wake_up", self._settings.init_timeout_s, (tags,) if reads_weights else (tags, False))

    def dtype_name(self) -> str:
        """The dtype in which the workers compute. With `dtype="auto"`, the workers choose it."""
        return self.collective_rpc("dtype_name")[0]
