"""Describes a failed step for the log, so that the failure can be diagnosed afterwards.

The description has numbers, seq_ids and the configuration. It contains no prompts, sampling parameters or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycore.config import EngineConfig
from raycore.messages import LoadView, StepPlan

_INT32_BYTES = 4


def describe_failed_step(
    error: BaseException, plan: StepPlan | None, seq_ids: Sequence[int], load: LoadView, config: EngineConfig
) -> str:
    """Return a description of the engine's state when a step failed, on several lines.

    Args:
        plan: the step's plan; None if the error came before the plan was made, or if there was nothing to compute.
        seq_ids: the seq_ids of the plan's requests, without those that have left their slots since.
    """
    return "\n    ".join(
        [
            f"a step failed with {type(error).__name__}. The state of the engine:",
            "no plan" if plan is None else _describe_plan(plan),
            f"seq_ids of the step: {list(seq_ids)}",
            f"load: {load}",
            f"configuration: {config}",
        ]
    )


def _describe_plan(plan: StepPlan) -> str:
    num_requests, num_new = len(plan.slots) // _INT32_BYTES, len(plan.new_requests)
    num_blocks = sum(len(new.block_ids) for new in plan.new_requests) + len(plan.new_block_ids)
    return (
        f"plan of step {plan.step}: {num_requests} requests, {plan.num_step_tokens} tokens; "
        f"{num_new} requests get a slot, {len(plan.freed_slots)} slots become free, "
        f"{num_blocks // _INT32_BYTES} blocks are handed out"
    )
