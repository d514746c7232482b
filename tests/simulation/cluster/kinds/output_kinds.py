"""Requests whose outputs are what is new, or only the last one, and those that don't want one for each token."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycore.sampling_params import RequestOutputKind
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.scenario import Request


class _OutputKind(Kind):
    name = "output kind"
    engine_share = 0.25

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[Any]:
        """The kind, and how many tokens an output has at least."""
        kind = draw.choice([RequestOutputKind.DELTA, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
        return [kind.name, draw.choice([1, 1, 3])]

    def apply(self, value: list[Any], request: Request, asked: Asked) -> None:
        kind = RequestOutputKind[value[0]]
        asked.params |= {"output_kind": kind, "stream_interval": value[1]}
        asked.is_delta = kind is RequestOutputKind.DELTA
        asked.is_cumulative = not asked.is_delta and asked.is_cumulative


KIND = _OutputKind()
