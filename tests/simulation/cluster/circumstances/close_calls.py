"""Operators whose calls come close together, so that one begins in the middle of another: of all kinds of calls."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.scenario import Operation

if TYPE_CHECKING:
    from simulation.cluster.operations.contract import Capability

_SECONDS = 4.0
_APART_S = (0.01, 0.1, 0.5)
"""How far calls are apart at most: as long as messages take, as a worker's reads, or as a change of many workers."""
_LONG_S, _LONG_SHARE = 8.0, 0.4
"""How much later the last call comes now and then of those that belong together: a sleep that waits for something is
told from one that is short."""
_FIRST_OPERATOR = 3
"""The first one who does nothing else."""


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    from simulation.cluster.operations.catalogue import CAPABILITIES  # they know circumstances

    weights = [_weight(each, options) for each in CAPABILITIES]
    made: list[Operation] = []
    for number in range(draw.choice([1, 2, 4])):
        at_s, apart_s = draw.uniform(0.0, _SECONDS), draw.choice(_APART_S)
        for index in range(2):
            capability = draw.choices(CAPABILITIES, weights)[0]
            operator = 0 if capability.has_one_operator else _FIRST_OPERATOR + 2 * number + index
            calls = capability.draw(draw, at_s + draw.uniform(0.0, apart_s), options)
            made += [replace(each, operator=operator) for each in _lengthened(draw, calls)]
    return Circumstance(operations=tuple(made))


def _weight(capability: Capability, options: Mapping[str, Any]) -> float:
    """Those that only few engines have come more often in these."""
    is_rare = "add_lora" in capability.kinds and options.get("enable_lora")
    return capability.weight * (3 if is_rare else 1)


def _lengthened(draw: random.Random, calls: Sequence[Operation]) -> list[Operation]:
    longer_s = _LONG_S if draw.random() < _LONG_SHARE else 0.0
    return [*calls[:1], *(replace(each, at_s=round(each.at_s + longer_s, 4)) for each in calls[1:])]
