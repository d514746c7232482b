"""The scheduler of a simulated rank: it says what its steps compute, and can take in the results of many at once.

A *run* is a row of steps of the same decodes, in which no request begins or ends and none is preempted. After a run,
the scheduler is as if it had planned and updated each of these steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.config import SchedulerConfig
from raycore.errors import InvalidConfig
from raycore.messages import StepPlan, StepResult
from raycore.scheduler.protocol import load_scheduler_class
from raycore.scheduler.scheduler import Scheduler
from raycore.scheduler.slots import LAST, PREFILL, Batch
from raycore.simulation.step_times import StepShape, shape_of

_LONGEST = 4096
"""Steps of a run. Longer ones save no time that can be seen."""


class RunningScheduler(Scheduler):
    """A scheduler that knows what its plans compute, and how many steps only go on with the present decodes."""

    takes_runs = True
    """Whether there are runs."""

    def shape_of(self, plan: StepPlan) -> StepShape:
        """Return what a step computes, right after it was planned."""
        slots = self._in_flight[-1].batch.slots
        computed = self._slots.computed[slots]
        if not plan.num_tokens:
            return StepShape(0, 0, 0.0, len(slots), int(computed.sum()) / len(slots))
        return shape_of(np.frombuffer(plan.num_tokens, np.int32).astype(np.int64), computed)

    def result_of(self, plan: StepPlan) -> StepResult:
        """Return the result that a step will have, right after it was planned. Tokens are numbers of requests."""
        batch, num_tokens = self._in_flight[-1].batch, b""
        seq_ids = batch.seq_ids
        if self._prefills:
            is_sampled = self._slots.phase[batch.slots] != PREFILL
            seq_ids, num_tokens = seq_ids[is_sampled], is_sampled.astype(np.int32).tobytes()
        return StepResult(plan.step, self._tokens_of(seq_ids).tobytes(), num_tokens)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their first step, or for their next one after a preemption."""
        return len(self._waiting)

    def decode_contexts(self) -> NDArray[np.int64]:
        """int64[n]: the number of planned tokens of each decode."""
        return self._slots.computed[self._slots.decodes().slots]

    def _tokens_of(self, seq_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """A token for each sequence. Different ones, so that outputs have no prefixes in common."""
        return (seq_ids % len(self._slots.num_stoppers)).astype(np.int32)

    def longest_run(self) -> int:
        """Return how many steps could follow those in flight that only do the same again; 0: none that is known.

        To be asked between a plan and the next event. Steps of models that keep states, free windows, encode images or
        speculate, and of engines with a KV connector or stages, have more to do: there, it is 0.
        """
        if not self.takes_runs or self._prefills or self._may_admit():
            return 0
        if self._hooks.plan_finished or self._hooks.decodes_planned:
            return 0  # parts have something to do in each step
        if self._blocks.frees_blocks or self._turns.number > 1:
            return 0
        batch = self._slots.decodes()
        if not len(batch.slots) or len(batch.slots) < self._slots.num_running:
            return 0
        if any(planned.batch is not batch for planned in self._in_flight):
            return 0
        # up to the step with which a request's last token is in flight
        longest = int((batch.last_positions - self._slots.computed[batch.slots]).min())
        return self._fitting_steps(batch, min(longest, _LONGEST))

    def run_decodes(self, num_steps: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Take in the results of so many steps, at most `longest_run()`. As many as before are in flight then.

        Returns: int64[n] and int32[n], the decodes' sequences, and the token that each has got in each of the steps.
        """
        batch, table = self._slots.decodes(), self._slots
        token_ids = self._tokens_of(batch.seq_ids)
        slots = batch.slots
        places = table.received[slots][:, None] + np.arange(num_steps)
        table.tokens[slots[:, None], places] = token_ids[:, None]
        table.received[slots] += num_steps
        num_computed = table.computed[slots] = table.computed[slots] + num_steps
        grown = slots[num_computed > self._blocks.capacity[slots]].tolist()
        if grown:
            for slot in grown:
                self._blocks.grow(slot, int(table.computed[slot]))
            self._publish(grown)
        at_end = (num_computed >= batch.last_positions).nonzero()[0]
        if len(at_end):
            table.set_phase(slots[at_end], LAST)
        return batch.seq_ids, token_ids

    def _may_admit(self) -> bool:
        """Whether a waiting request might begin in the next step.

        One that has been refused for lack of blocks won't: while requests only decode, fewer blocks are free.
        """
        if not len(self._waiting) or not self._num_free_slots:
            return False
        return self._refused != (self._waiting.peek(), self._pool.num_free)

    def _fitting_steps(self, batch: Batch, num_steps: int) -> int:
        """The largest number of steps, up to `num_steps`, for which there are blocks without a preemption."""
        room = self._blocks.capacity[batch.slots] - self._slots.computed[batch.slots]

        def needed(count: int) -> int:
            return int(np.maximum(0, -((room - count) // self._block_size)).sum())

        most = self._pool.num_free
        if num_steps <= 0 or needed(num_steps) <= most:
            return max(0, num_steps)
        low, high = 0, num_steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= most else (low, middle)
        return low


class _SteppingScheduler(RunningScheduler):
    """Takes in each step alone."""

    takes_runs = False


def scheduler_class(config: SchedulerConfig, *, takes_runs: bool = True) -> type[RunningScheduler]:
    """Return the class of a simulated rank's scheduler. That of `scheduler_cls` has no runs.

    Raises:
        InvalidConfig: `scheduler_cls` can't be imported, or isn't a subclass of raycore's.
    """
    chosen = load_scheduler_class(config)
    if config.scheduler_cls is None:
        return RunningScheduler if takes_runs else _SteppingScheduler
    if not issubclass(chosen, Scheduler):
        raise InvalidConfig(f"scheduler_cls={config.scheduler_cls}: simulate needs a subclass of raycore's Scheduler")
    bases: Any = (chosen, _SteppingScheduler)
    return type(chosen.__name__, bases, {})
