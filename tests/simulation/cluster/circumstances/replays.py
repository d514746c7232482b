"""Requests whose rank is lost fail at once, instead of going on elsewhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import Fault, Moment

_SECONDS = 2.0


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    faults = [_fault(draw) for _ in range(draw.choice([1, 2]))]
    return Circumstance({"max_request_replays": 0}, faults=tuple(faults))


def _fault(draw: random.Random) -> Fault:
    when = Moment(round(draw.uniform(0.0, _SECONDS), 4))
    return Fault(when=when, kind=draw.choice(["kill engine", "kill worker"]), target=draw.randrange(8))
