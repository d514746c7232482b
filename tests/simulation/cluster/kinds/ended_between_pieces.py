"""Prompts in pieces that operators abort while the next piece is awaited, in each way that there is."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from simulation.cluster.kinds.ended_by_operators import WAYS, abort_of
from simulation.cluster.kinds.kind import Kind
from simulation.scenario import Operation, Request

_PIECES = ("pieces", "slow pieces")
_SOON_S = 0.2
"""Virtual seconds within which a prompt so far is continued, if nothing breaks."""


class _EndedBetweenPieces(Kind):
    name = "ended between pieces"
    engine_share = 0.5
    request_share = 0.3  # less than that of pieces, so that these are drawn first

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[Any] | None:
        """(way, after how many seconds)"""
        delays = [delay_s for name in _PIECES for delay_s, _, _ in request.wants.get(name, ())]
        if not delays:
            return None
        longest = delays.index(max(delays))
        after_s = sum(delays[:longest]) + draw.random() * max(_SOON_S, delays[longest])
        return [draw.choice(WAYS), round(after_s, 4)]

    def operations(self, draw: random.Random, requests: Iterable[Request]) -> list[Operation]:
        of = ((number, each, each.wants.get(self.name)) for number, each in enumerate(requests))
        return [abort_of(number, value[0], each.at_s + value[1]) for number, each, value in of if value is not None]


KIND = _EndedBetweenPieces()
