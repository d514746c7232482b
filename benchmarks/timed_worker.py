"""A worker that notes what each of its steps computes, and how long that takes."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from raycore.messages import StepPlan, StepResult
from raycore.rpc.pending import Pending
from raycore.simulation.step_times import StepShape, shape_of
from raycore.worker.worker import Worker


class TimedStep(NamedTuple):
    """A step. Times are of `time.perf_counter()` in the worker."""

    shape: StepShape
    num_new: int
    """Requests that begin."""
    begun_s: float
    ended_s: float


class TimedWorker(Worker):
    """For a CPU, where a step has been computed when `execute_model` returns."""

    def init_device(self) -> None:
        super().init_device()
        self._computed: dict[int, int] = {}
        """By slot: its tokens with keys and values."""
        self._timed: list[TimedStep] = []

    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        shape, begun_s = self._shape(plan), time.perf_counter()
        result = super().execute_model(plan)
        self._timed.append(TimedStep(shape, len(plan.new_requests), begun_s, time.perf_counter()))
        return result

    def take_timed_steps(self) -> list[TimedStep]:
        """The steps since the last call."""
        taken, self._timed = self._timed, []
        return taken

    def _shape(self, plan: StepPlan) -> StepShape:
        for request in plan.new_requests:
            self._computed[request.slot] = request.num_computed_tokens
        slots = np.frombuffer(plan.slots, np.int32).tolist()
        counts = np.frombuffer(plan.num_tokens, np.int32).tolist() or [1] * len(slots)
        for slot, count in zip(slots, counts, strict=True):
            self._computed[slot] += count
        computed = [self._computed[slot] for slot in slots]
        return shape_of(np.array(counts, np.int64), np.array(computed, np.int64))
