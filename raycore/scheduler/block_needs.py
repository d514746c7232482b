"""Whether there are blocks for a request that could begin."""

from __future__ import annotations

from collections.abc import Iterable

from raycore.kvcache.block_table import BlockTable
from raycore.scheduler.part import Hooks, Start
from raycore.scheduler.request import Request, RequestLimits
from raycore.scheduler.slots import SlotTable


class BlockNeeds:
    """What running requests will still need, and those that parts have promised blocks to."""

    def __init__(self, limits: RequestLimits, slots: SlotTable, blocks: BlockTable, hooks: Hooks) -> None:
        self._limits = limits
        self._slots = slots
        self._blocks = blocks
        self._pool = blocks.pool
        self._promised_blocks = hooks.promised_blocks

    def has_blocks_for(self, start: Start, prefills: Iterable[Request]) -> bool:
        """Whether there are blocks for all known tokens of a request, in addition to what running requests will need.

        Running requests need blocks for the rest of their prompts, and one block of each group to grow. If only the
        first chunk of the request were checked, it could take blocks that later chunks of running requests need.
        Without blocks to grow, a request, usually this one, would be preempted within a few steps.

        `prefills`: the running requests in the phase PREFILL.
        """
        missing = self._limits.num_blocks_for(len(start.request.tokens)) - sum(map(len, start.cached.blocks))
        promised = sum(self._num_missing(other) for other in prefills)
        num_free_cached = sum(map(self._pool.num_free_among, start.cached.blocks))
        reserved = promised + self._slots.num_running * self._blocks.num_groups + num_free_cached
        for promised_blocks in self._promised_blocks:
            reserved += promised_blocks(start.request)
        return missing + reserved <= self._pool.num_free

    def _num_missing(self, request: Request) -> int:
        """Return how many more blocks a running request holds at most until all its known tokens are computed."""
        layout = self._limits.layout
        if layout is None or not self._blocks.frees_blocks:
            return self._blocks.num_missing(request.slot, len(request.tokens))
        most, held = layout.blocks_of(len(request.tokens)), self._blocks.num_held(request.slot)
        return sum(max(0, of_group - now) for of_group, now in zip(most, held, strict=True))
