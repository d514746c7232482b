"""Tells speculation how long steps take."""

from __future__ import annotations

from raycore.engine.part import EnginePart
from raycore.messages import StepPlan
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.scheduler.outputs import StepOutputs


class SpeculationTiming(EnginePart):
    """See the module."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation

    def step_done(self, plan: StepPlan, outputs: StepOutputs) -> None:
        if plan.slots:
            self._speculation.observe(plan.num_step_tokens, plan.has_drafts, outputs.duration_s)
