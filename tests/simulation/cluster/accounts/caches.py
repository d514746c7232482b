"""What is believed of the ranks' caches: each rank's connector tells of what it holds, and clients know just that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from support.scheduler_parts import parts_of

from raycore.kvcache.prefix_cache import state_name
from raycore.scheduler.prefix_states import PrefixStates
from simulation.cluster.accounts.account import Account, Run, ranks_of
from simulation.worker.transfers import transfers_of

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_SHARE = 0.5
"""Of the scenarios in which it is looked at: the others are shut down before all news have come."""


class Caches(Account):
    """The blocks of idle ranks, by their digests."""

    is_of_clients = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._looks = random.Random(f"caches {run.scenario.seed}").random() < _SHARE

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        if self._looks and llm._client.failure is None:
            for process, transfers in transfers_of(self.run.cluster.world):
                for what, value in () if process.has_ended or process.is_stopped else transfers.under_way():
                    if value:
                        yield f"the engine is idle, and {process} has {what}: {value}"
        for connection, _, rank in ranks_of(llm) if self._looks else ():
            assert rank._core is not None, "the client is connected to it"
            dp_rank, log, cache = connection.dp_rank, rank._mailbox.cache_log, rank._core.scheduler._pool.prefix_cache
            if log is None:
                continue
            held, told = set(cache._block_of[0]), set(log._held)
            for part in parts_of(rank._core.scheduler, PrefixStates):
                held.update(map(state_name, part.snapshots._row_of))
            if not told <= held:
                yield f"dp_rank {dp_rank} tells of {len(told - held)} blocks that it doesn't hold"
            # blocks of adapters are nobody else's
            if not told >= held and not self.run.scenario.options.get("enable_lora"):
                yield f"dp_rank {dp_rank} holds {len(held - told)} blocks that it doesn't tell of"
            routes = llm._client._requests.routes
            stored = routes.held._stored  # pyright: ignore[reportAttributeAccessIssue]  # a connector has a log
            known = {digest for digest, ranks in stored.items() if ranks >> dp_rank & 1}
            if known != told:
                numbers = f"{len(known - told)} too many, and {len(told - known)} too few"
                yield f"a client believes of dp_rank {dp_rank}'s blocks {numbers}"
