"""A Ray that exports metrics. The engine lives for some of the intervals at which it records them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import Fault, Moment, Operation

_SECONDS = 20.0


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    num_ranks = options["data_parallel_size"]
    scalings = (
        Operation(
            at_s=round(draw.uniform(0.0, _SECONDS), 4),
            kind="scale",
            arguments={"data_parallel_size": draw.randint(1, num_ranks + 1), "drain_timeout_s": 0.1},
        )
        for _ in range(draw.choice([0, 1, 2, 4]))
    )
    faults = (
        Fault(when=Moment(round(draw.uniform(0.0, _SECONDS / 2), 4)), kind="kill engine", target=draw.randrange(8))
        for _ in range(draw.choice([0, 1, 2]))
    )
    return Circumstance(operations=tuple(scalings), faults=tuple(faults), exports_metrics=True)
