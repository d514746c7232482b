"""Other processes that look at the engine, and call it, through its control actor, whose name they know.

Now and then, that actor's process ends.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import Fault, Moment, Operation

PUBLISHED_S = 0.5
"""Virtual seconds after its start within which others see an engine as it is."""
_SECONDS = 4.0


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    moments = [PUBLISHED_S, *(draw.uniform(0.0, _SECONDS) for _ in range(draw.choice([0, 1, 3])))]
    looks = (
        Operation(at_s=round(at_s, 4), kind="read_status", arguments={"node": draw.randrange(3)}, operator=2)
        for at_s in sorted(moments)
    )
    found = tuple(looks)
    if draw.random() < 0.5:
        at_s, node = round(draw.uniform(PUBLISHED_S, _SECONDS), 4), draw.randrange(3)
        found += (Operation(at_s=at_s, kind="call_from_elsewhere", arguments={"node": node}, operator=2),)
    apart = random.Random(f"ends of control actors {draw.random()}")
    faults = tuple(
        Fault(when=Moment(round(apart.uniform(0.0, _SECONDS), 4)), kind="kill control")
        for _ in range(apart.choice([0, 0, 1]))
    )
    return Circumstance({"engine_name": "simulated"}, tuple(sorted(found, key=lambda each: each.at_s)), faults)
