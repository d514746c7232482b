"""Requests that end when they repeat themselves. Their outputs are made of two or three tokens, so most of them do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycore.sampling_params import RepetitionDetectionParams
from simulation.cluster.kinds.kind import VOCABULARY, Asked
from simulation.cluster.kinds.rules import Rule
from simulation.scenario import Request


class _Repetition(Rule):
    request_share = 0.19  # the smallest: what requests are of other kinds is drawn before

    def __init__(self) -> None:
        super().__init__("repetition", self._drawn)

    def _drawn(self, draw: random.Random, request: Request) -> dict[str, Any]:
        shortest = draw.choice([0, 2, 2, 3])
        return {
            "allowed_token_ids": [draw.randrange(1, VOCABULARY) for _ in range(draw.choice([2, 3]))],
            "min_tokens": min(request.max_tokens, draw.choice([0, 0, 0, 4])),
            "ignore_eos": draw.random() < 0.5,
            "repetition": [shortest, max(1, shortest) + draw.choice([0, 0, 1, 4]), draw.choice([2, 2, 2, 3])],
        }

    def apply(self, value: Mapping[str, Any], request: Request, asked: Asked) -> None:
        rules = dict(value)
        shortest, longest, count = rules.pop("repetition")
        rules["repetition_detection"] = RepetitionDetectionParams(longest, shortest, count)
        super().apply(rules, request, asked)


KIND = _Repetition()
