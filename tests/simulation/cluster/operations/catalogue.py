"""All capabilities."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from simulation.cluster.operations.aborts import Aborts
from simulation.cluster.operations.adapters import Adapters
from simulation.cluster.operations.caches import Caches
from simulation.cluster.operations.checkpoints import Checkpoints
from simulation.cluster.operations.contract import Capability
from simulation.cluster.operations.loads import Loads
from simulation.cluster.operations.log_stats import LogStats
from simulation.cluster.operations.pauses import Pauses
from simulation.cluster.operations.reads import Reads
from simulation.cluster.operations.scaling import Scaling
from simulation.cluster.operations.statuses import Statuses
from simulation.cluster.operations.updates import Updates
from simulation.scenario import Operation

# what ends an update comes before what ends a pause, and before a reload
CAPABILITIES: tuple[Capability, ...] = (
    Updates(), Pauses(), Checkpoints(), Loads(), Scaling(), Caches(), Reads(), Aborts(), Adapters(), Statuses(),
    LogStats(),
)  # fmt: skip
CAPABILITY_OF = {kind: capability for capability in CAPABILITIES for kind in capability.kinds}
"""By kind of operation."""


def draw_operations(
    draw: random.Random, options: Mapping[str, Any], seconds: float, others: Iterable[Operation] = ()
) -> tuple[Operation, ...]:
    """What operators do within this time besides `others`, in order."""
    made: list[Operation] = []
    for _ in range(draw.choice([0, 0, 1, 1, 2, 4])):
        capability = draw.choices(CAPABILITIES, [each.weight for each in CAPABILITIES])[0]
        operator = 0 if capability.has_one_operator else draw.choice([0, 0, 1])
        drawn = capability.draw(draw, draw.uniform(0.0, seconds), options)
        made += [replace(each, operator=operator) for each in drawn]
    return tuple(sorted([*made, *others], key=lambda each: each.at_s))
