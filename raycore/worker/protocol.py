"""What an executor asks of a worker: the methods that a class named by `worker_cls` must have. Knows no torch."""

from __future__ import annotations

from typing import Protocol

from raycore.config import EngineConfig
from raycore.messages import StepPlan, StepResult
from raycore.worker.rank import WorkerRank


class WorkerProtocol(Protocol):
    """One rank's worker. Calls come from one thread, in the order of the methods here.

    Most custom workers subclass `raycore.worker.worker.Worker` and override a few methods. A worker may have a float
    attribute `load_progress`, the share of the weights that has been read; it is read from any thread. With
    `device="cuda"` it also needs `gpu_id()`, and for structured outputs `prepare_grammars()`. Any other method can be
    called by `collective_rpc`, with arguments and results that can be pickled.
    """

    def __init__(self, config: EngineConfig, rank: WorkerRank) -> None:
        """Note what is to be done. Nothing is allocated yet."""
        ...

    def init_device(self) -> None:
        """Choose the device, and join the other ranks. All ranks do so at the same time."""
        ...

    def load_model(self) -> None:
        """Load this rank's weights."""
        ...

    def determine_available_memory(self) -> int:
        """Bytes left for this rank's share of the KV cache."""
        ...

    def bytes_per_block(self) -> int:
        """Bytes of one block of the KV cache on this rank."""
        ...

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        ...

    def warm_up(self) -> None:
        """Do what the first step would otherwise have to wait for."""
        ...

    def dtype_name(self) -> str:
        """The number format of weights and activations, such as `bfloat16`."""
        ...

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        """Run one step. Returns the result on tp_rank 0, None on the others."""
        ...

    def check_health(self) -> None:
        """Raise if the device no longer works."""
        ...

    def shutdown(self) -> None:
        """Leave the other ranks and free the memory. Idempotent. May be called at any time after `__init__`."""
        ...
