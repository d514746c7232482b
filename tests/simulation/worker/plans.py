"""What plans say: each slot once."""

from __future__ import annotations

import numpy as np

from raycore.messages import StepPlan
from simulation.worker import complaints


def look(plan: StepPlan, worker: str) -> None:
    """Complain if a plan lets a slot be freed, begin, or compute twice."""
    listed = {
        "freed": plan.freed_slots,
        "to begin": [each.slot for each in plan.new_requests],
        "to compute": np.frombuffer(plan.slots, np.int32).tolist(),
    }
    for what, slots in listed.items():
        if len(set(slots)) < len(slots):
            complaints.disagrees(f"{worker} gets a plan, of step {plan.step}, with slots {what} twice: {slots}")
