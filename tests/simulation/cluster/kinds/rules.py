"""What requests of a few kinds have in common: parameters that say which tokens may come, and which ones end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from simulation.cluster.kinds.kind import VOCABULARY, Asked, Kind
from simulation.scenario import Request

NAMES = ("allowed tokens", "bad words", "constraint", "min tokens", "stop tokens")


class Rule(Kind):
    """Parameters that are drawn as they are."""

    engine_share = 0.2
    excludes = (*NAMES, "pooled", "refused")

    def __init__(self, name: str, params: Callable[[random.Random, Request], dict[str, Any]]) -> None:
        self.name = name
        self._params = params

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> dict[str, Any]:
        return self._params(draw, request)

    def apply(self, value: dict[str, Any], request: Request, asked: Asked) -> None:
        asked.params |= value


def many_tokens(draw: random.Random) -> list[int]:
    """Tokens of which the next one is one soon."""
    return list(range(draw.randrange(4), VOCABULARY, 4))
