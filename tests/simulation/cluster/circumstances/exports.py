"""A Ray that exports metrics. The engine lives for some of the intervals at which it records them.

Recording one raises now and then: what was recorded before isn't recorded again, and all is once it doesn't.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances import raising
from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import AtMessage, Fault, Moment, Operation

_SECONDS = 20.0
_RECORDINGS = (*(("set", number) for number in (1, 5, 20, 60)), *(("inc", number) for number in (1, 2, 3, 5, 8)))
"""Which of all calls raises that record gauges or counters. A first report has many of both, and a later one a few."""


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
    circumstance = Circumstance(operations=tuple(scalings), faults=tuple(faults), exports_metrics=True)
    failing = (
        Fault(when=AtMessage(method, "before it is sent", number), kind=raising.KIND)
        for method, number in draw.sample(_RECORDINGS, draw.choice([0, 0, 1, 2]))
    )
    return circumstance + Circumstance(faults=tuple(failing))
