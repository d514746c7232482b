"""Takes in which experts computed a step's tokens, and tells clients of their requests' tokens.

What the prefix cache holds isn't computed again, so the experts of its tokens are kept as long as their blocks: in an
array with a row for each place of the KV cache. A result overwrites the rows of the places that its step has computed.
Results come in the order of steps, and workers write the cache in the same order, so the rows are always those of the
cache's content after the newest result.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from raycore.messages import StepPlan, StepResult, TokenReport
from raycore.models.spec import ModelSpec
from raycore.parts.routed_experts.models import NAME, ExpertRows
from raycore.scheduler.part import SchedulerPart, SchedulerView, Start
from raycore.scheduler.request import Request
from raycore.scheduler.step_builder import InFlight


class CachedExperts(SchedulerPart):
    """Keeps the experts of what is in the KV cache, and adds those of cached prefixes to what workers report."""

    order = 90

    def __init__(self, spec: ModelSpec) -> None:
        self._rows = ExpertRows.of(spec)
        self._planned: deque[NDArray[np.int64]] = deque()
        """Of each step in flight: where its tokens are in the KV cache, request after request."""
        self._cached: dict[int, int] = {}
        """By slot: with how many cached tokens its request has begun, until its first result arrives."""

    def attach(self, view: SchedulerView) -> None:
        self._slots, self._blocks = view.slots, view.blocks
        assert view.blocks.windows[0] is None, "the blocks of the first group keep all tokens"
        num_places = view.pool.num_blocks * view.blocks.block_size
        self._kept = np.zeros((num_places, self._rows.width), self._rows.dtype)  # the system gives memory where used

    def started(self, start: Start) -> None:
        if start.num_computed:
            self._cached[start.request.slot] = start.num_computed

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        self._cached.pop(slot, None)

    def plan_finished(self, plan: StepPlan) -> None:
        """Note where the step's tokens are: their requests may have left their blocks when its result arrives."""
        slots = np.frombuffer(plan.slots, np.int32).astype(np.int64)
        counts = np.ones(len(slots), np.int64)
        if plan.num_tokens:
            counts = np.frombuffer(plan.num_tokens, np.int32).astype(np.int64)
        starts = self._slots.computed[slots] - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        self._planned.append(self._blocks.places(np.repeat(slots, counts), positions))

    def result_arrived(self, step: InFlight, result: StepResult) -> None:
        """Keep the experts of all of the step's tokens, and change what is reported of them.

        Experts of wrong drafts aren't reported. Those that are kept are overwritten with what follows.
        """
        places = self._planned.popleft()
        if not len(places):
            return
        own = [each for each in result.reports if each[1].part == NAME]
        num_rows = len(step.batch.slots)
        by_stage = [own[first : first + num_rows] for first in range(0, len(own), num_rows)]
        rows = self._rows.joined([b"".join(report.data for _, report in stage) for stage in by_stage], len(places))
        self._kept[places] = rows
        result.reports = [each for each in result.reports if each[1].part != NAME]
        first = 0
        for (row, report), num_wrong in zip(by_stage[0], _num_wrong_drafts(step, result), strict=True):
            end = first + report.num_tokens
            request = step.live_request(row, self._slots)
            if request is not None:
                right = np.concatenate([self._cached_rows(request.slot), rows[first : end - num_wrong]])
                position = report.position + int(report.num_tokens - num_wrong) - len(right)
                result.reports.append((row, TokenReport(NAME, position, len(right), right.tobytes())))
            first = end

    def _cached_rows(self, slot: int) -> NDArray[np.generic]:
        """The rows of the cached tokens with which a slot's request has begun, once. Later, none."""
        num_cached = self._cached.pop(slot, 0)
        return self._kept[self._blocks.places(np.full(num_cached, slot), np.arange(num_cached))]

    def check_integrity(self) -> None:
        assert all(self._slots.requests[slot] is not None for slot in self._cached)


def _num_wrong_drafts(step: InFlight, result: StepResult) -> NDArray[np.int64]:
    """Return, by row of the batch, how many of its tokens are drafts that turned out to be wrong."""
    wrong = np.zeros(len(step.batch.slots), np.int64)
    if step.has_drafts:
        wrong[step.drafted] = step.drafts.lengths + 1 - step.num_new(result)
    return wrong
