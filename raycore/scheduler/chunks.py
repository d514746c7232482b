"""Divides the tokens that requests have when they get their slots into the chunks of steps."""

from __future__ import annotations

from collections.abc import Iterable

from raycore.scheduler.part import Hooks
from raycore.scheduler.request import Request
from raycore.scheduler.slots import SlotTable
from raycore.scheduler.step_builder import Chunk


class Chunks:
    """How many tokens of which requests a step may compute. Parts may limit that. Allocates nothing."""

    def __init__(self, slots: SlotTable, longest: int, hooks: Hooks) -> None:
        """`longest`: maximum number of tokens of a chunk. 0: there is none."""
        self._slots = slots
        self._longest = longest
        self._limit_chunk = hooks.limit_chunk
        self._keeps_tokens = hooks.keeps_tokens

    def of_running(self, prefills: Iterable[Request], budget: int) -> list[Chunk]:
        """Return chunks of requests in the phase PREFILL, of at most `budget` tokens together."""
        chunks: list[Chunk] = []
        for request in prefills:
            if not budget:
                break
            chunk = self.of(request, int(self._slots.computed[request.slot]), budget)
            if chunk.num_tokens:
                budget -= chunk.num_tokens
                chunks.append(chunk)
            elif self.keep_the_rest():
                break
        return chunks

    def of(self, request: Request, num_computed: int, budget: int) -> Chunk:
        """Return a request's chunk after its first `num_computed` tokens. It may have no tokens."""
        num_known = len(request.tokens)
        remaining = num_known - num_computed
        end = num_computed + min(remaining, self._longest or remaining, budget)
        for limit_chunk in self._limit_chunk:
            end = limit_chunk(request, num_computed, end, num_computed + min(remaining, budget))
        return Chunk(request, end - num_computed, end == num_known)

    def keep_the_rest(self) -> bool:
        """Whether the rest of the step's tokens is kept for a request that has just got none."""
        return bool(self._keeps_tokens) and any(keeps_tokens() for keeps_tokens in self._keeps_tokens)
