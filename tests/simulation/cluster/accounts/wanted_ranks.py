"""Requests that name a rank: it computes them, as long as nothing takes it out of service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.operations.caches import Caches
from simulation.cluster.operations.log_stats import LogStats
from simulation.cluster.operations.reads import Reads
from simulation.cluster.records import Record

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_HARMLESS = {*Caches.kinds, *LogStats.kinds, *Reads.kinds, "abort_requests", "pause_generation", "resume_generation"}
"""What operators do that takes no rank out of service."""


class WantedRanks(Account):
    """Where requests are when they have outputs."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._llm: AsyncLLM | None = None

    def begin(self, llm: AsyncLLM) -> None:
        # where ranks compute prompts for others, a request is on either
        if "kv_transfer_config" not in self.run.scenario.options:
            self._llm = llm

    def output(self, record: Record, output: Any) -> None:
        wanted = record.request.wants.get("rank")
        if wanted is None or self._llm is None or self._is_disturbed:
            return
        request = self._llm._client._requests._underway.get(record.name)
        if request is not None and request.dp_rank != wanted:
            self.problems.append(f"{record.name} is on dp_rank {request.dp_rank}, and wanted dp_rank {wanted}")

    @property
    def _is_disturbed(self) -> bool:
        has_broken = self.run.faults.first_s <= self.run.cluster.world.now_s
        return has_broken or any(deed.operation.kind not in _HARMLESS for deed in self.run.recorder.deeds)
