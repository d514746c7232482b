"""Ranks that share the experts of a model: they run each step together, and are one failure domain.

The workers meet in each step: see `simulation.worker.meeting`.
"""

from __future__ import annotations

import random
from typing import Any

from simulation.cluster.deployments.deployment import Deployment, dummy_model

_NUM_EXPERTS = 48


def options_of_shared(draw: random.Random) -> dict[str, Any]:
    """The options of ranks that share experts."""
    model = dummy_model("MixtralForCausalLM", num_experts=_NUM_EXPERTS, num_experts_per_tok=2)
    return model | {"enable_expert_parallel": True, "dp_sync_interval": draw.choice([1, 1, 2, 4])}


def drawn(draw: random.Random) -> Deployment:
    options = options_of_shared(draw)
    num_ranks, num_stages, num_workers = draw.choice([(1, 1, 1), (2, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)])
    return Deployment(options, num_ranks, num_stages, num_workers)
