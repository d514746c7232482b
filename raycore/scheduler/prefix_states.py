"""Prefix caching for models whose layers keep states: plans which states are kept, and which requests begin with one.

The state of a prefix is kept where other requests may go on: at the end of the last full block before a request's last
known token, and every `interval` tokens. Workers know the state after a step's tokens, and those after the tokens of
drafts of the last step. So the state where a step begins is kept by that step, and one at its end by the slot's next.
"""

from __future__ import annotations

import numpy as np

from raycore.config.states import StateRows
from raycore.kvcache.snapshots import Snapshots
from raycore.messages import StatePlan, StepPlan
from raycore.scheduler.part import SchedulerPart, SchedulerView, Start, Verdict
from raycore.scheduler.request import Request
from raycore.scheduler.step_builder import StepBuilder


class PrefixStates(SchedulerPart):
    """Connects the states of prefixes to requests. Comes with `Prefixes`."""

    order = 20

    def __init__(self, rows: StateRows) -> None:
        self.snapshots = Snapshots(range(rows.first_prefix, rows.total))
        self._interval = rows.interval
        self._num_passed = np.zeros(rows.num_slots, np.int64)
        """By slot: of the multiples of the interval up to where it is, how many have been dealt with."""
        self._begins: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int, int]] = []
        """As in `StatePlan`."""

    def attach(self, view: SchedulerView) -> None:
        self._slots = view.slots
        self._cache = view.pool.prefix_cache
        self._block_size = view.blocks.block_size
        self._saved = view.hooks.state_saved
        self.snapshots.watch(view.hooks.state_removed)

    def offer(self, start: Start) -> Verdict:
        """Shorten the blocks that a request begins with to a prefix that has a state, too."""
        cached, digests = start.cached, start.request.digests
        while (usable := self.snapshots.longest(digests[: cached.num_blocks])) < cached.num_blocks:
            cached = self._cache.match(digests, usable)
        start.begin_with(cached, self._block_size)
        return Verdict.START

    def started(self, start: Start) -> None:
        """Plan that a request begins with the state after its cached blocks."""
        request, num_blocks = start.request, start.cached.num_blocks
        if num_blocks:
            self._begins.append((request.slot, self.snapshots.read(request.digests[num_blocks - 1])))

    def chunk_planned(self, request: Request, start: int, end: int, *, is_first: bool) -> None:
        """Plan to keep states of a step that computes the tokens of a request from `start` to before `end`."""
        slot, last = request.slot, (len(request.tokens) - 1) // self._block_size * self._block_size
        self._num_passed[slot] = (end - 1) // self._interval
        # if there are too few rows, the longest prefixes get them
        wanted = {last, *range(start - start % self._interval, end, self._interval)}
        for num_tokens in sorted(wanted, reverse=True):
            if start + is_first <= num_tokens < end and num_tokens:
                self._save(request, num_tokens)

    def decodes_planned(self, step: StepBuilder) -> None:
        """Plan to keep states of a step that computes the next token of its decodes, without their drafts."""
        table, slots = self._slots, step.decodes.slots
        num_passed = (table.computed[slots] - 1) // self._interval
        is_due = num_passed > self._num_passed[slots]
        if not is_due.any():
            return
        self._num_passed[slots] = num_passed
        due: list[int] = slots[is_due].tolist()
        for slot in due:
            request, num_tokens = table.requests[slot], int(self._num_passed[slot]) * self._interval
            assert request is not None
            # without the values of all tokens, nobody could find the state
            if table.received[slot] >= num_tokens:
                self._save(request, num_tokens)

    def plan_finished(self, plan: StepPlan) -> None:
        """Add what the plan does with states."""
        self.snapshots.complete_plan()
        begins, self._begins = self._begins, []
        saves, self._saves = self._saves, []
        if begins or saves:
            plan.states = StatePlan(np.array(begins, np.int32).tobytes(), np.array(saves, np.int32).tobytes())

    def clearing(self) -> None:
        """Forget the states of all prefixes."""
        self.snapshots.clear()

    def check_integrity(self) -> None:
        """Assert the invariants. For tests."""
        self.snapshots.check_integrity()

    def _save(self, request: Request, num_tokens: int) -> None:
        num_blocks, tokens = num_tokens // self._block_size, self._slots.tokens[request.slot]
        if num_blocks > len(request.digests):
            request.extend_digests(tokens, num_blocks, self._block_size)
        row = self.snapshots.write(request.digests[num_blocks - 1])
        if row is not None:
            self._saves.append((request.slot, num_tokens, row))
            for saved in self._saved:
                saved(request, num_blocks, row)
