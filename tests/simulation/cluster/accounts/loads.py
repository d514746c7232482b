"""How many requests each rank has: every client knows it, though it may be those of others, and so do operators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from simulation.cluster.accounts.account import Account, Run, ranks_of

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_SHARE = 0.3
"""Of the scenarios in which it is looked at: the others are shut down before all reports have come."""


class Loads(Account):
    """What clients know of idle ranks."""

    is_of_clients = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._looks = random.Random(f"loads {run.scenario.seed}").random() < _SHARE

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        if not self._looks or llm._client.failure is not None:
            return
        for connection, _, rank in ranks_of(llm):
            assert rank._core is not None, "the client is connected to it"
            own, known = rank._core.scheduler.load(), connection.load
            if (own.num_running, own.num_waiting) != (known.num_running, known.num_waiting):
                yield (
                    f"dp_rank {connection.dp_rank} runs {own.num_running} requests, and {own.num_waiting} wait there, "
                    f"but a client takes it for {known.num_running} and {known.num_waiting}"
                )
        for dp_rank, link in llm._client.links().items():
            if link.is_leaving or link.load.num_running or link.load.num_waiting:
                yield f"dp_rank {dp_rank} is idle, and its client has the view {link}"
        if llm._client._connections._client_index == 0:
            yield from self._of_statuses(llm)

    def _of_statuses(self, llm: AsyncLLM) -> Iterator[str]:
        """What is wrong with what operators are told."""
        told = llm.ranks
        statuses = {each.dp_rank: each for each in told}
        if sorted(statuses) != [each.dp_rank for each in told]:
            yield f"operators are told of the dp_ranks {[each.dp_rank for each in told]}"
        for connection, process, _ in ranks_of(llm):
            status = statuses.get(connection.dp_rank)
            if status is None:
                yield f"operators aren't told of dp_rank {connection.dp_rank}"
            elif status.state in ("serving", "paused", "asleep"):
                node = cast("Any", process.machine).id
                if status.pid != process.pid or status.node_ids[:1] != [node]:
                    yield f"dp_rank {connection.dp_rank} is {process} of {node}, and operators are told {status}"
                if status.num_running or status.num_waiting or status.num_deferred or any(status.kv_fetches.values()):
                    yield f"the engine is idle, and operators are told {status}"
