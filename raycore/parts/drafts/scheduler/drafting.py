"""Adds drafts to the decodes of a step, as far as tokens and blocks are left over."""

from __future__ import annotations

from typing import Any

import numpy as np

from raycore.messages import StepPlan, StepResult
from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.part import SchedulerPart, SchedulerView
from raycore.scheduler.request import Request
from raycore.scheduler.step_builder import InFlight, StepBuilder


class DraftPlanning(SchedulerPart):
    """Has running decodes verify the guesses of `speculation`."""

    order = 30

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation

    def attach(self, view: SchedulerView) -> None:
        self._max_step_tokens = view.config.max_num_batched_tokens
        self._slots = view.slots
        self._blocks = view.blocks
        self._pool = view.pool
        self._block_size = view.blocks.block_size

    def decodes_planned(self, step: StepBuilder) -> None:
        """Choose and plan drafts. The last tokens before them have been planned, and have their blocks."""
        if not self.speculation.is_looking:
            return
        table, blocks, slots = self._slots, self._blocks, step.decodes.slots
        num_other = sum(chunk.num_tokens for chunk in step.chunks)
        budget = self._max_step_tokens - len(slots) - num_other
        # a draft may take a request to its last token but one, after which the last one is sampled
        limits = step.decodes.last_positions - table.computed[slots]
        drafts = self.speculation.propose(slots, table, limits, budget, num_other)
        if len(drafts):
            # leave each running request a block to grow
            needed = step.num_missing_blocks(table, blocks) + table.num_running * blocks.num_groups
            drafts = self._fitting(drafts, (self._pool.num_free - needed) // blocks.num_groups)
        if len(drafts):
            workers_draft = self.speculation.workers_draft
            step.add_drafts(drafts, workers_draft=workers_draft)
            table.advance_over_drafts(drafts.slots, drafts.lengths, waits_for_result=not workers_draft)
            is_over = table.computed[drafts.slots] > blocks.capacity[drafts.slots]
            for slot in drafts.slots[is_over].tolist():
                step.grow(slot, int(table.computed[slot]), blocks)

    def _fitting(self, drafts: Drafts, num_blocks: int) -> Drafts:
        """Shorten drafts so that they take at most `num_blocks` more blocks of each group."""
        room = self._blocks.capacity[drafts.slots] - self._slots.computed[drafts.slots]
        missing = np.maximum(0, -((room - drafts.lengths) // self._block_size))
        fits = np.cumsum(missing) <= num_blocks
        if fits.all():
            return drafts
        return drafts.shortened(np.where(fits, drafts.lengths, np.minimum(drafts.lengths, room)))

    def result_applied(self, step: InFlight, result: StepResult, outputs: StepOutputs) -> None:
        """Count the step's drafts, and forget those that were wrong."""
        if not step.has_drafts:
            return
        slots, is_live, num_right = step.drafts.slots, step.is_live(self._slots), step.num_new(result) - 1
        self._slots.settle(slots[is_live], step.drafts.lengths[is_live], num_right[is_live])
        if result.num_drafts:
            lengths = np.frombuffer(result.num_drafts, np.int32)[step.drafted].astype(np.int64)
            is_drafted = lengths > 0
            self.speculation.count(slots[is_drafted], lengths[is_drafted], num_right[is_drafted])
            is_drafted &= is_live
            self.speculation.learn(slots[is_drafted], lengths[is_drafted], num_right[is_drafted])

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        self.speculation.forget(slot, request.num_prompt_tokens)

    def load(self) -> dict[str, Any]:
        return {"drafts": self.speculation.stats}


class PlanningAhead(DraftPlanning):
    """Has the last of several stages make drafts after a step, for the next one of its requests."""

    def plan_finished(self, plan: StepPlan) -> None:
        next_drafts = self.speculation.next_drafts(np.frombuffer(plan.slots, np.int32).astype(np.int64))
        if next_drafts.any():
            plan.next_drafts = next_drafts.tobytes()
