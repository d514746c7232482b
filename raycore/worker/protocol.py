"""The interface of a worker: the methods that the class in the option `worker_cls` must have. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raycore.activity import TAGS, MemoryTag
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config import EngineConfig
from raycore.messages import Computation, StepPlan, StepResult
from raycore.rpc.pending import Pending
from raycore.worker.rank import WorkerRank


class WorkerProtocol(Protocol):
    """A worker: one tensor-parallel rank of one stage of an engine. All its methods are called from one thread.

    At startup, the order of calls is `init_device()`, `load_model()`, `get_kv_cache_spec()`,
    `determine_available_memory()` (unless the number of blocks is configured), `initialize_cache()`, `warm_up()`. Most
    custom workers subclass `raycore.worker.worker.Worker` and override a few methods.

    A worker may have a float attribute `load_progress`: the fraction of the weights that has been read, 0 to 1. Any
    thread may read it. With `device="cuda"`, a worker also needs the method `gpu_id()`. For structured outputs, it
    needs `sample_tokens()` (see `execute_model()`), or `prepare_grammars()` if it follows grammars itself. All are
    described in `Worker`. `collective_rpc` can call any other method whose arguments and results can be pickled.
    Profiles need the method `profile()`, saved weights the method `save_sharded_state()`, LoRA adapters the methods
    `prepare_adapters()` and `drop_adapters()`, and drafts by a model the method `take_draft_token_ids()`, described
    there, too. KV connectors need the method `get_kv_connector_handshake_metadata()` of `Worker`, and their reports
    with the results of steps. If other methods than those of updates change the weights, `num_weight_changes` of
    `Worker` says so. Ranks that share experts need the methods `memory_need()`, `regroup()` and
    `accompany_warm_up()` of `Worker`; without them, all ranks are restarted when their number changes.
    """

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        """Store the arguments. Must not allocate memory on the device yet."""
        ...

    def init_device(self) -> None:
        """Choose the device, and connect to the other workers. All workers run this method at the same time."""
        ...

    def load_model(self) -> None:
        """Load this worker's share of the weights."""
        ...

    def determine_available_memory(self) -> int:
        """Return how many bytes are available for this worker's share of the KV cache."""
        ...

    def get_kv_cache_spec(self) -> WorkerCacheSpec:
        """Return what each layer of this worker's stage keeps in the blocks of the KV cache."""
        ...

    def initialize_cache(self, cache: KVCacheConfig) -> None:
        """Allocate a KV cache of `cache.num_blocks` blocks. Plans have block ids for each group of `cache.layout`."""
        ...

    def warm_up(self) -> None:
        """Do one-time work that would otherwise delay the first step."""
        ...

    def dtype_name(self) -> str:
        """Return the name of the dtype of weights and activations, such as `bfloat16`."""
        ...

    def computation(self) -> Computation:
        """Return what computes the model."""
        ...

    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        """Run one step. Returns the result on the worker whose rank `reports_steps`, and None on the others.

        A worker may have a method `sample_tokens(grammar)`, too. It then computes the logits here, and returns None.
        `sample_tokens` is called next, samples, and returns what is described here. `grammar` is a `GrammarOutput`,
        which the engine has made meanwhile, if the plan is `masked`; otherwise it is None, and this method may as well
        do everything itself. A subclass of `Worker` that overrides this method, but not `sample_tokens`, samples here:
        it gets the masks with the plan, in `plan.grammar`.

        A worker whose device still computes the step may return a `Pending` instead, which gives the result, or None,
        later. Up to `EngineConfig.max_steps_in_flight` steps are then started before the first one's result is taken.
        """
        ...

    def sleep(self, level: int, tags: Sequence[MemoryTag] = TAGS) -> None:
        """Give up memory. No step runs until `wake_up()` and, for the KV cache, `initialize_cache()`.

        Args:
            level: 1 keeps weights in the host's memory, 2 drops them.
            tags: which memory. The KV cache's content and everything that depends on the cache is dropped at any level.
                Weights are only given up together with the cache, or after it.
        """
        ...

    def wake_up(self, tags: Sequence[MemoryTag] = TAGS, reads_weights: bool = True) -> None:
        """Get weights back that were given up: from the host's memory, or loaded again.

        The cache is allocated again by a call of `initialize_cache()`, then `warm_up()`, as at startup.

        Args:
            reads_weights: whether weights that were dropped are loaded. If not, an update has to bring all of them.
        """
        ...

    def check_health(self) -> None:
        """Raise an error if the device no longer works."""
        ...

    def shutdown(self) -> None:
        """Disconnect from the other workers and free all memory. Idempotent. Callable at any time after `__init__`."""
        ...
