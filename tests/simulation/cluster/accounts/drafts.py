"""Drafts: each rank counts what its workers have found of them, and tries seldom what doesn't pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from support.scheduler_parts import parts_of

from raycore.parts.drafts.scheduler.drafting import DraftPlanning
from simulation.cluster.accounts.account import Account, first_worker_of, ranks_of
from simulation.worker.steps import drafts_of, too_many_drafts

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class Drafts(Account):
    """How many drafts and tokens of drafts idle ranks count, and how many of these were right."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        for connection, _, rank in ranks_of(llm):
            assert rank._core is not None, "the client is connected to it"
            worker, parts = first_worker_of(rank), parts_of(rank._core.scheduler, DraftPlanning)
            if not parts or worker is None:
                continue
            stats = parts[0].speculation.stats
            found = drafts_of(self.run.cluster.world).get(worker, Counter())
            counted = {"drafts": stats.num_drafts, "tokens": stats.num_draft_tokens}
            counted["right"] = sum(stats.accepted_per_position)
            if any(found[what] != number for what, number in counted.items()):
                yield f"dp_rank {connection.dp_rank} counts {counted} of drafts, and its worker {dict(found)}"

    def over(self) -> Iterator[str]:
        yield from too_many_drafts(self.run.cluster.world)
