"""A program that has its engine log its figures now and then."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import Operation

_SECONDS = 6.0
_OPERATOR = 30
"""Nobody else's."""


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    moments = sorted(draw.uniform(0.0, _SECONDS) for _ in range(draw.choice([2, 3, 5])))
    return Circumstance(
        operations=tuple(Operation(at_s=round(each, 4), kind="do_log_stats", operator=_OPERATOR) for each in moments)
    )
