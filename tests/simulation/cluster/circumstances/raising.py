"""A call of an actor raises what nobody expects, as for lack of memory: when it is made, or when its answer is read."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import AtMessage, Boundary, Fault

KIND = "raise"
_PLACES: tuple[tuple[str, Boundary], ...] = (
    ("submit", "before it is sent"),
    ("outputs", "heard"),
    ("step_age_s", "before it is sent"),
    ("step_age_s", "heard"),
)


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    method, boundary = draw.choice(_PLACES)
    return Circumstance(faults=(Fault(when=AtMessage(method, boundary, draw.choice([1, 1, 2, 3, 5, 8])), kind=KIND),))
