"""A trainer's weights, which are in no file, in an engine whose weights had other names before: they are lost by a deep
sleep, or stay although files are damaged that are read in their place.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.cluster.deployments.deployment import update_of_all
from simulation.cluster.operations.contract import operation
from simulation.scenario import Operation
from simulation.worker import model
from simulation.worker.weights import FIRST_DAMAGED


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    """Within the time in which requests come, by the operator who makes updates."""
    if options.get("runner") == "pooling":  # whose weights can't change
        return Circumstance()
    at_s = draw.uniform(0.0, 0.3)
    made: list[Operation] = []
    for _ in range(draw.choice([0, 1, 1, 2])):
        made.append(operation(at_s, "update_weight_version", new_version=f"name {draw.randrange(1000)} of files"))
        at_s += draw.uniform(0.0, 0.2)
    made += update_of_all(draw, at_s)
    at_s += draw.uniform(0.0, 0.5)
    if draw.random() < 0.5:
        damaged = FIRST_DAMAGED + draw.randrange(len(model.UNITS))
        made.append(operation(at_s, "reload_weights", checkpoint=damaged, weight_version="damaged"))
    else:
        mode = draw.choice(["abort", "keep"])
        made.append(operation(at_s, "sleep", level=draw.choice([1, 2, 2]), mode=mode))
        made.append(operation(at_s + draw.uniform(0.0, 0.5), "wake_up"))
    made.append(operation(at_s + 1.0, "weights_checksum"))
    return Circumstance(operations=tuple(made))
