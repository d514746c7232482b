"""Actors, processes and groups: all are gone after an engine's shutdown, or a failed start, while its program goes on.

After the program's end, Ray itself ends what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulation.cluster.accounts.account import Account
from simulation.cluster.judges import left_by_driver

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class Shutdown(Account):
    """What there is in the cluster after `shutdown()`, or a failed start."""

    def not_started(self) -> Iterator[str]:
        for each in left_by_driver(self.run.cluster):
            yield f"the engine didn't start, and its program goes on: {each}"

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        if self.run.lacked_control_store:
            return
        for each in left_by_driver(self.run.cluster):
            yield f"the engine was shut down, and its program goes on: {each}"
        status = llm._read_status()
        if status.ranks:
            yield f"the engine was shut down, and has {len(status.ranks)} ranks"
