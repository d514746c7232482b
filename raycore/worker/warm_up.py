"""The steps that a worker runs before the first request, so that one-time costs don't delay it."""

from __future__ import annotations

import numpy as np

from raycore.config import SchedulerConfig
from raycore.messages import NewRequest, StepPlan
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.worker.setup import WorkerSetup
from raycore.worker.worst_steps import worst_steps


def warm_up_plans(setup: WorkerSetup, num_groups: int) -> list[StepPlan]:
    """Return the plans of a short prompt, of a decode step, and of a step that ends the request. They use block 0.

    A model that pools has no decode step.

    `num_groups`: number of groups of the KV cache.
    """
    block_size = setup.config.tokens_per_block
    num_tokens = min(8, block_size, setup.config.scheduler.max_model_len)
    pooling = None if setup.config.model.spec.pooling is None else PoolingParams()
    request = NewRequest(
        slot=0,
        token_ids=np.zeros(num_tokens - 1, np.int32).tobytes(),
        num_prompt_tokens=num_tokens - 1,
        num_computed_tokens=0,
        block_ids=np.zeros(num_groups, np.int32).tobytes(),
        params=SamplingParams(temperature=0.0),
        seed=0,
        pooling=pooling,
    )
    if pooling is not None:
        count = np.array([num_tokens - 1], np.int32).tobytes()
        step = StepPlan(step=-2, slots=np.zeros(1, np.int32).tobytes(), num_tokens=count, new_requests=[request])
        return [step, StepPlan(step=-1, freed_slots=[0])]
    slot = np.zeros(1, np.int32).tobytes()
    counts = np.array([num_tokens - 1], np.int32).tobytes()
    plans = [
        StepPlan(step=-3, slots=slot, num_tokens=counts, new_requests=[request]),
        StepPlan(step=-2, slots=slot),
        StepPlan(step=-1, freed_slots=[0]),
    ]
    if setup.backend.operations_by == "triton":
        # compiles the kernels that other requests need; Triton keeps them on disk for the next start
        plans += worst_steps(SchedulerConfig(1, num_tokens, num_tokens), block_size, num_groups=num_groups)
    return plans
