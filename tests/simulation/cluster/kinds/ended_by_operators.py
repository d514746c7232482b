"""Requests that operators abort, in each way that there is. Some aborts come just as outputs do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from simulation.cluster.kinds.kind import Kind
from simulation.cluster.operations.contract import operation
from simulation.scenario import AtMessage, Operation, Request

WAYS = ("abort", "abort", "abort_requests", "abort_requests", "abort all")
_DIRECT_WAYS = ("abort", "abort", "abort", *WAYS)
"""Of those that come with outputs: the others go to a thread of their own first."""
_PLACES = 15
"""So many places the program comes to at most until an output that has come is at its caller."""
_OPERATOR = 3
"""One of their own, who waits for no other call."""
_SOON_S = 0.2
"""Virtual seconds in which most requests run, if nothing breaks."""


class _EndedByOperators(Kind):
    name = "ended by operators"
    engine_share = 0.2
    request_share = 0.34
    excludes = ("refused", "pieces", "slow pieces")

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[Any]:
        """(way, after how many seconds, with which of the next outputs, 0: with none; how many places later)"""
        with_output = draw.choice([0, 1, 1, 2, 3, 4, 6, 8])
        if not with_output:
            return [draw.choice(WAYS), round(draw.uniform(0.0, _SOON_S), 4), 0, 0]
        return [draw.choice(_DIRECT_WAYS), 0.0, with_output, draw.randint(0, _PLACES)]

    def operations(self, draw: random.Random, requests: Iterable[Request]) -> list[Operation]:
        made: list[Operation] = []
        for number, request in enumerate(requests):
            if self.name in request.wants:
                way, after_s, with_output, places = request.wants[self.name]
                message = AtMessage("outputs", "heard", with_output) if with_output else None
                own = abort_of(number, way, request.at_s + after_s)
                made.append(replace(own, with_message=message, places_later=places))
        return made


def abort_of(number: int, way: str, at_s: float) -> Operation:
    """The abort of a request by an operator who does nothing else. `way`: one of `WAYS`."""
    if way == "abort all":
        return replace(operation(at_s, "abort_requests", request_ids=None), operator=_OPERATOR)
    return replace(operation(at_s, way, request_ids=[f"r{number}"]), operator=_OPERATOR)


KIND = _EndedByOperators()
