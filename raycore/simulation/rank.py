"""One rank in virtual time: its scheduler, and the steps that its workers would compute."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.engine.scheduling import Shared, make_scheduler
from raycore.errors import InvalidRequest
from raycore.messages import NO_LOAD, EngineRequest, FinishedRequest, LoadView, StepPlan, StepResult
from raycore.scheduler.outputs import StepOutputs
from raycore.simulation.decode_runs import RunningScheduler, scheduler_class
from raycore.simulation.step_times import StepTimes

_SHORTEST = 3
"""Shorter runs cost more than their steps."""


class _Step(NamedTuple):
    """A step that the device computes, or that waits for it."""

    plan: StepPlan
    result: StepResult
    planned_s: float
    end_s: float


@dataclass(slots=True)
class _Run:
    """A run of decodes (see `decode_runs`). Its first steps are those in flight."""

    ends_s: list[float]
    """When each step ends, those in flight first."""
    durations_s: list[float]
    """Of the steps after those in flight: results of so many steps may be taken in at once, and then another one."""


class Told(NamedTuple):
    """What a client gets."""

    steps: list[tuple[StepOutputs, float]]
    """The outputs of steps, each with the time at which they came."""
    load: LoadView
    """After the last one."""


class SimulatedRank:
    """The engine of one rank.

    After `submit`, the caller calls `wake`, and at the time `next_s` `go_on`.
    """

    def __init__(
        self, config: EngineConfig, cache: KVCacheConfig, times: StepTimes, *, takes_runs: bool = True
    ) -> None:
        """`takes_runs`: whether results of steps that only go on with the same decodes are taken in at once."""
        chosen = scheduler_class(config.scheduler, takes_runs=takes_runs)
        scheduler = make_scheduler(chosen, config, cache, Shared())
        assert isinstance(scheduler, RunningScheduler)
        self.scheduler = scheduler
        self._depth = config.max_steps_in_flight
        self._times = times
        self._in_flight: deque[_Step] = deque()
        self._run: _Run | None = None
        self._free_s = 0.0
        """When the device has computed everything in flight."""
        self._arrived_s: dict[int, float] = {}
        """By seq_id: when a request came that hasn't begun."""
        self.busy_s = 0.0
        """How long the device takes for all steps so far."""
        self.num_steps = 0
        self.told_load: LoadView = NO_LOAD
        """The load in the last batch that the client has got."""

    @property
    def next_s(self) -> float | None:
        """When the next result comes, or the one after those that are taken in at once. None: nothing is computed."""
        if self._run is not None:
            return self._run.ends_s[len(self._run.durations_s)]
        return self._in_flight[0].end_s if self._in_flight else None

    def settle(self, now_s: float) -> Told | None:
        """End the run that is under way, if there is one, because something else happens at `now_s`.

        Returns the results that have come before. None: there are none.
        """
        if self._run is None:
            return None
        ended = self._end_run(self._run, bisect_left(self._run.ends_s, now_s, 0, len(self._run.durations_s)))
        return None if ended is None else Told([ended], self.scheduler.load())

    def submit(self, requests: Iterable[EngineRequest], now_s: float) -> Told | None:
        """Add requests, after `settle`. Returns what the client gets of those that are refused, if there are any."""
        assert self._run is None, "settle() comes first"
        refused: list[FinishedRequest] = []
        for request in requests:
            try:
                self.scheduler.submit(request)
                self._arrived_s[request.seq_id] = now_s
            except InvalidRequest as error:
                refused.append(FinishedRequest(request.seq_id, "error", str(error)))
        return Told([(StepOutputs(finished=refused), now_s)], self.scheduler.load()) if refused else None

    def wake(self, now_s: float) -> None:
        """Start what can be started, because requests have come. A rank that computes sees them after its step."""
        if not self._in_flight:
            self._start(now_s)
        elif self._run is None and not self.scheduler.num_waiting:  # else its step tells the client that they wait
            self._look_for_run()

    def go_on(self, now_s: float) -> Told | None:
        """Take in what has come at `next_s`, and start what follows. Returns what the client gets."""
        ended = None if self._run is None else self._end_run(self._run, len(self._run.durations_s))
        step = self._in_flight.popleft()
        outputs = self.scheduler.update(step.plan, step.result)
        outputs.queued = [(seq_id, step.planned_s - self._arrived_s.pop(seq_id)) for seq_id, _ in outputs.started]
        self._start(now_s)
        return Told([(outputs, now_s)] if ended is None else [ended, (outputs, now_s)], self.scheduler.load())

    def _start(self, now_s: float) -> None:
        while len(self._in_flight) < self._depth and self.scheduler.has_work():
            plan = self.scheduler.schedule()
            if plan is None:
                break
            shape = self.scheduler.shape_of(plan)
            took_s = self._times.step_s(shape)
            num_sequences = shape.num_prompts + shape.num_decodes
            start_s = max(now_s + self._times.engine_s(num_sequences, len(plan.new_requests)), self._free_s)
            self._free_s = start_s + took_s
            self._note(1, took_s)
            self._in_flight.append(_Step(plan, self.scheduler.result_of(plan), now_s, self._free_s))
        self._look_for_run()

    def _look_for_run(self) -> None:
        """Begin a run if nothing has to be decided for some steps."""
        num_steps = self.scheduler.longest_run() if self._in_flight else 0
        if num_steps < _SHORTEST:
            return
        contexts = self.scheduler.decode_contexts()
        num_decodes = len(contexts)
        later = np.arange(1, num_steps + 1, dtype=np.float64) + int(contexts.sum()) / num_decodes
        durations_s = self._times.decodes_s(num_decodes, later)
        engine_s = self._times.engine_s(num_decodes)
        ends_s = [step.end_s for step in self._in_flight]
        if len(ends_s) == 1:  # each step begins when the engine has its time after the one before
            parts_s = np.full(1 + 2 * num_steps, engine_s)
            parts_s[0], parts_s[2::2] = ends_s[0], durations_s
            self._run = _Run(np.add.accumulate(parts_s)[::2].tolist(), durations_s.tolist())
            return
        last_s = ends_s[-1]
        for index, took_s in enumerate(durations_s.tolist()):
            last_s = max(ends_s[index] + engine_s, last_s) + took_s
            ends_s.append(last_s)
        self._run = _Run(ends_s, durations_s.tolist())

    def _end_run(self, run: _Run, num_ended: int) -> tuple[StepOutputs, float] | None:
        """Take in the results of the first steps of a run. Returns their outputs, and when the last one came."""
        self._run = None
        if not num_ended:
            return None
        # those in flight are the same steps, but later ones
        ends_s = run.ends_s[num_ended : num_ended + len(self._in_flight)]
        self._in_flight = deque(step._replace(end_s=end_s) for step, end_s in zip(self._in_flight, ends_s, strict=True))
        self._free_s = ends_s[-1]
        self._note(num_ended, sum(run.durations_s[:num_ended]))
        seq_ids, token_ids = self.scheduler.run_decodes(num_ended)
        outputs = StepOutputs(seq_ids=np.repeat(seq_ids, num_ended), token_ids=np.repeat(token_ids, num_ended))
        return outputs, run.ends_s[num_ended - 1]

    def _note(self, num_steps: int, took_s: float) -> None:
        self.num_steps += num_steps
        self.busy_s += took_s
