"""Ranks that share experts, and whose number changes again and again while requests come, and nothing breaks.

So no rank is started that stays in the group: its experts move, and it goes on with all that it has. What ranks tell
each other of their requests may be late.
"""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.cluster.deployments.experts import options_of_shared
from simulation.scenario import Operation

_MOST_RANKS = 4
_CPUS_OF_A_RANK = 2.0
"""Its worker's and its engine's."""
_APART_S = (3.0, 12.0)
"""Virtual seconds between two changes. In one, ranks may start, and those that leave finish their requests."""

_LATE_S = 2.0
"""How late ranks may hear of others that have requests: after a change, that is nothing to them."""


def drawn(draw: random.Random) -> Deployment:
    first = num_ranks = draw.choice([1, 2, 2, 3])
    at_s, operations = draw.uniform(0.0, 1.0), list[Operation]()
    for _ in range(draw.choice([1, 2, 3])):
        num_ranks = draw.choice([each for each in range(1, _MOST_RANKS + 1) if each != num_ranks])
        arguments = {"data_parallel_size": num_ranks, "drain_timeout_s": draw.choice([0.0, 0.5, 5.0])}
        operations.append(Operation(at_s=round(at_s, 4), kind="scale", arguments=arguments, operator=1))
        at_s += draw.uniform(*_APART_S)
    num_nodes = draw.choice([1, 2])
    return Deployment(
        options_of_shared(draw),
        first,
        num_repeats=4,
        operations=tuple(operations),
        nodes=tuple({"CPU": _CPUS_OF_A_RANK * (_MOST_RANKS + 1)} for _ in range(num_nodes)),
        late_calls={"start_wave": _LATE_S} if draw.random() < 0.7 else {},
        is_calm=True,
    )
