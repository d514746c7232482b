"""How many requests each rank has: every client knows it, though it may be those of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
        for connection, _, rank in ranks_of(llm) if self._looks else ():
            assert rank._core is not None, "the client is connected to it"
            own, known = rank._core.scheduler.load(), connection.load
            if (own.num_running, own.num_waiting) != (known.num_running, known.num_waiting):
                yield (
                    f"dp_rank {connection.dp_rank} runs {own.num_running} requests, and {own.num_waiting} wait there, "
                    f"but a client takes it for {known.num_running} and {known.num_waiting}"
                )
