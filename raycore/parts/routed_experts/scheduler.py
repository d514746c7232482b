"""Takes in which experts computed a step's tokens, and tells clients of their requests' tokens.

What the prefix cache holds isn't computed again, so the experts of its tokens are kept as long as their blocks: in an
array with a row for each place of the KV cache. A result overwrites the rows of the places that its step has computed.
Results come in the order of steps, and workers write the cache in the same order, so the rows are always those of the
cache's content after the newest result.

While drafts are in flight, a plan doesn't say which positions its step computes: that depends on how many drafts turn
out to be right, and on how many the workers make. So the places of all that may be are noted, and the result tells
which of them they were.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

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
        self._planned: deque[_Places] = deque()
        """Of each step in flight."""
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
        ends = self._slots.computed[slots]
        starts = np.maximum(0, self._slots.least_computed(slots) - counts)
        counts = ends - starts
        first_rows = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - first_rows, counts)
        self._planned.append(_Places(self._blocks.places(np.repeat(slots, counts), positions), first_rows - starts))

    def result_arrived(self, step: InFlight, result: StepResult) -> None:
        """Keep the experts of all of the step's tokens, and change what is reported of them.

        Experts of wrong drafts aren't reported. Those that are kept are overwritten with what follows.
        """
        planned = self._planned.popleft()
        own = [each for each in result.reports if each[1].part == NAME]
        if not own:
            return
        num_rows = len(step.batch.slots)
        by_stage = [own[first : first + num_rows] for first in range(0, len(own), num_rows)]
        places = planned.of([report for _, report in by_stage[0]])
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


class _Places(NamedTuple):
    """Where tokens of a step in flight are in the KV cache: all that it may compute."""

    places: NDArray[np.int64]
    """Request after request, in the order of positions."""
    offsets: NDArray[np.int64]
    """By row of the batch: what has to be added to a position to find it in `places`."""

    def of(self, reports: list[TokenReport]) -> NDArray[np.int64]:
        """Return the places of the tokens that were computed, as each row's report says."""
        firsts = self.offsets + [report.position for report in reports]
        counts = np.array([report.num_tokens for report in reports])
        starts = np.cumsum(counts) - counts
        return self.places[np.arange(int(counts.sum())) + np.repeat(firsts - starts, counts)]


def _num_wrong_drafts(step: InFlight, result: StepResult) -> NDArray[np.int64]:
    """Return, by row of the batch, how many of its tokens are drafts that turned out to be wrong."""
    wrong = np.zeros(len(step.batch.slots), np.int64)
    if result.num_drafts:
        num_drafts = np.frombuffer(result.num_drafts, np.int32)[step.drafted]
        wrong[step.drafted] = num_drafts + 1 - step.num_new(result)
    return wrong
