"""Blocks of the KV cache, slots, and places of adapters, embeddings, states and grammars: each rank has all back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulation.cluster.accounts.account import Account, ranks_of
from simulation.engine.leftovers import leftovers

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class Ranks(Account):
    """What idle ranks hold."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        for connection, _, rank in ranks_of(llm):
            assert rank._core is not None, "the client is connected to it"
            for each in leftovers(rank._core, rank._mailbox):
                yield f"dp_rank {connection.dp_rank} is idle, and has {each}"
