"""What may be around an engine, whatever it is made of: other processes, what Ray does besides, calls that raise,
and callers who get no second try.

A module for each. Its `drawn` draws a `Circumstance` for the seeds in whose share they are, from a generator of its
own: so one more of them changes no other seed.
"""

from __future__ import annotations

__all__ = ["NONE", "drawn"]

import random
from collections.abc import Callable, Mapping
from typing import Any

from simulation.cluster.circumstances import (
    changed_weights,
    close_calls,
    events,
    exports,
    figures,
    observers,
    raising,
    replays,
    trainers,
)
from simulation.cluster.circumstances.circumstance import Circumstance

ALL: dict[str, tuple[float, Callable[[random.Random, Mapping[str, Any]], Circumstance]]] = {
    "observers": (0.06, observers.drawn),
    "exports": (0.06, exports.drawn),
    "raising": (0.06, raising.drawn),
    "replays": (0.06, replays.drawn),
    "weight changes": (0.1, changed_weights.drawn),
    "close calls": (0.1, close_calls.drawn),
    "events": (0.06, events.drawn),
    "figures": (0.06, figures.drawn),
    "trainers": (0.06, trainers.drawn),
}
"""By name: the share of the seeds that have it, and what draws it for the engine's options."""


NONE = Circumstance()


def drawn(seed: int, options: Mapping[str, Any]) -> Circumstance:
    """All that there is around the engine of a seed."""
    found = NONE
    for name, (share, draw_one) in ALL.items():
        draw = random.Random(f"{name} {seed}")
        if draw.random() < share:
            found += draw_one(draw, options)
    return found
