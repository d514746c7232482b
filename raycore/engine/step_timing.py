"""Tells speculation how long steps take."""

from __future__ import annotations

from raycore.engine.part import EnginePart
from raycore.messages import StepPlan
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.scheduler.outputs import StepOutputs
from raycore.system import time


class SpeculationTiming(EnginePart):
    """See the module."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._done_s = time.monotonic()
        """When the last step was done, before whose end the next one may have been planned."""

    def step_done(self, plan: StepPlan, outputs: StepOutputs) -> None:
        last_s, self._done_s = self._done_s, time.monotonic()
        if plan.slots:
            duration_s = min(outputs.duration_s, self._done_s - last_s)
            self._speculation.observe(plan.num_step_tokens, plan.has_drafts, duration_s)
