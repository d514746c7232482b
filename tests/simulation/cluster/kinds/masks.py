"""Outputs that have to be one of some texts, in engines that make masks for their workers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycore.structured_outputs import StructuredOutputsParams
from simulation.cluster.kinds.kind import VOCABULARY, Asked, Kind
from simulation.cluster.kinds.rules import NAMES
from simulation.scenario import Request

MASKED_WORKER = "simulation.worker.masked.MaskedWorker"


class _Masks(Kind):
    name = "mask"
    engine_share = 0.3
    request_share = 0.3  # less than of those who may bring the tokenizer
    excludes = (*NAMES, "pooled", "refused", "repetition")

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        # other requests may have to be refused if there is no tokenizer, so none is added for this
        if options.get("runner") == "pooling" or "worker_cls" in options or options.get("skip_tokenizer_init", True):
            return None
        return {"worker_cls": MASKED_WORKER}

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[list[int]]:
        """The texts' tokens. Some begin alike."""
        first = [draw.randrange(1, VOCABULARY) for _ in range(draw.choice([0, 0, 4]))]
        return [first + [draw.randrange(1, VOCABULARY) for _ in range(draw.randrange(1, 16))] for _ in range(3)]

    def apply(self, value: list[list[int]], request: Request, asked: Asked) -> None:
        asked.params["structured_outputs"] = StructuredOutputsParams(
            choice=[" ".join(map(str, text)) for text in value]
        )


KIND = _Masks()
