"""The calls that every executor makes of its workers, in terms of `collective_rpc`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from raycore.config import ExecutorConfig
from raycore.executor.base import Pending
from raycore.messages import StepPlan, StepResult

DUMMY_STEP = -1
"""The number of every step that has none of the scheduler's."""


class CollectiveCalls(ABC):
    """Asks all workers, and makes one answer of theirs."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._settings = config

    @abstractmethod
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

    @abstractmethod
    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        """See `Executor.execute`."""

    def execute_dummy_batch(self) -> Pending[StepResult]:
        """See `Executor.execute_dummy_batch`: to the workers it is a step like any other."""
        return self.execute(StepPlan(DUMMY_STEP))

    def determine_available_memory(self) -> int:
        """Bytes that the worker with the least has left for its share of the KV cache."""
        return min(self.collective_rpc("determine_available_memory", self._settings.init_timeout_s))

    def bytes_per_block(self) -> int:
        """Bytes that one block takes on the worker where it takes most."""
        return max(self.collective_rpc("bytes_per_block"))

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and warm the model up."""
        self.collective_rpc("initialize_cache", self._settings.init_timeout_s, (num_blocks,))
        self.collective_rpc("warm_up", self._settings.init_timeout_s)

    def dtype_name(self) -> str:
        """What the workers compute in."""
        return self.collective_rpc("dtype_name")[0]
