"""Ranks that share the experts of a model: they run each step together, and are one failure domain.

The workers meet in each step: see `simulation.worker.meeting`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from simulation.cluster.deployments.deployment import Deployment, dummy_model, update_of_all
from simulation.scenario import Operation

_NUM_EXPERTS = 48
_MEETING_SHARE = 0.25
_CHANGE_S = 3.0
"""About how long a change of the group takes: mostly a rank starts."""
_WAITS_S = 3.0
"""How long updates wait for new ranks now and then. A worker's part of a call takes less."""


def options_of_shared(draw: random.Random) -> dict[str, Any]:
    """The options of ranks that share experts."""
    model = dummy_model("MixtralForCausalLM", num_experts=_NUM_EXPERTS, num_experts_per_tok=2)
    return model | {"enable_expert_parallel": True, "dp_sync_interval": draw.choice([1, 1, 2, 4])}


def drawn(draw: random.Random) -> Deployment:
    options = options_of_shared(draw)
    num_ranks, num_stages, num_workers = draw.choice([(1, 1, 1), (2, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)])
    made = Deployment(options, num_ranks, num_stages, num_workers)
    return _meeting(draw, made) if draw.random() < _MEETING_SHARE else made


def _meeting(draw: random.Random, made: Deployment) -> Deployment:
    """The same with a change of the group, and an update that begins meanwhile: also before a new rank is up."""
    at_s, is_growth = draw.uniform(0.0, 1.0), draw.random() < 0.8
    num_ranks = made.num_ranks + 1 if is_growth else max(made.num_ranks - 1, 1)
    scale = Operation(
        at_s=round(at_s, 4),
        kind="scale",
        arguments={"data_parallel_size": num_ranks, "drain_timeout_s": 0.5},
        operator=1,
    )
    update = update_of_all(draw, at_s + draw.uniform(0.0, _CHANGE_S), draw.choice([0.2, 1.5]))
    waits = {"weight_update_timeout_s": _WAITS_S} if draw.random() < 0.7 else {}
    return replace(made, options=made.options | waits, operations=(scale, *update))
