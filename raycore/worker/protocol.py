"""The interface of a worker: the methods that the class named by `worker_cls` must have. Does not import torch."""

from __future__ import annotations

from typing import Protocol

from raycore.config import EngineConfig
from raycore.messages import StepPlan, StepResult
from raycore.worker.rank import WorkerRank


class WorkerProtocol(Protocol):
    """One rank's worker. All calls come from one thread.

    At startup the order is `init_device()`, `load_model()`, `bytes_per_block()`, `determine_available_memory()` unless
    the number of blocks is configured, `initialize_cache()`, `warm_up()`. Most custom workers subclass
    `raycore.worker.worker.Worker` and override a few methods.

    A worker may have a float attribute `load_progress`, the fraction of the weights that has been read. Any thread may
    read it. With `device="cuda"` a worker also needs `gpu_id()`, and for structured outputs `prepare_grammars()`.
    `collective_rpc` can call any other method whose arguments and results can be pickled.
    """

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        """Store the arguments. Nothing is allocated yet."""
        ...

    def init_device(self) -> None:
        """Choose the device and join the other ranks, which make this call at the same time."""
        ...

    def load_model(self) -> None:
        """Load this rank's weights."""
        ...

    def determine_available_memory(self) -> int:
        """Bytes available for this rank's share of the KV cache."""
        ...

    def bytes_per_block(self) -> int:
        """Bytes of one KV cache block on this rank."""
        ...

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        ...

    def warm_up(self) -> None:
        """Do one-time work that would otherwise delay the first step."""
        ...

    def dtype_name(self) -> str:
        """The dtype of weights and activations, such as `bfloat16`."""
        ...

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        """Run one step. Returns the result on tp_rank 0, None on the others."""
        ...

    def check_health(self) -> None:
        """Raise if the device no longer works."""
        ...

    def shutdown(self) -> None:
        """Leave the other ranks and free all memory. Idempotent. May be called at any time after `__init__`."""
        ...
