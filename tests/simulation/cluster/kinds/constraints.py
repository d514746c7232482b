"""Outputs that have to be one of some texts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycore.errors import InvalidRequest
from raycore.structured_outputs import StructuredOutputsParams
from simulation.cluster.kinds.kind import VOCABULARY, Asked, Kind
from simulation.ray.host import REFUSED
from simulation.scenario import Request


class _Constraint(Kind):
    name = "constraint"
    engine_share = 0.25
    excludes = ("min tokens", "stop tokens", "allowed tokens", "bad words", "refused", "pooled")

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"skip_tokenizer_init": False}

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[list[int]]:
        """The texts' tokens. None at all: what can't be compiled."""
        if draw.random() < 0.1:
            return []
        return [[draw.randrange(1, VOCABULARY) for _ in range(draw.randrange(1, 8))] for _ in range(3)]

    def apply(self, value: list[list[int]], request: Request, asked: Asked) -> None:
        texts = [" ".join(map(str, text)) for text in value] or [REFUSED]
        asked.params["structured_outputs"] = StructuredOutputsParams(choice=texts)
        if not value:
            asked.error = InvalidRequest, REFUSED


KIND = _Constraint()
