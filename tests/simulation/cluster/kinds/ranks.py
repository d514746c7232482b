"""Requests that name a rank. While it is away, another one gets them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from raycore.errors import InvalidRequest
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.cluster.operations.contract import History
from simulation.cluster.records import Record
from simulation.scenario import Fault, Moment, Request

_NOTICED_S = 3.0
"""Virtual seconds within which an engine notices that a node is drained."""


class _Rank(Kind):
    name = "rank"
    engine_share = 0.3
    request_share = 0.5
    excludes = ("refused",)

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return {} if options["data_parallel_size"] > 1 else None

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> int:
        return draw.randrange(options["data_parallel_size"])

    def faults(self, draw: random.Random, requests: Iterable[Request], options: Mapping[str, Any]) -> list[Fault]:
        """A node is to be given up, and its ranks leave it, while requests come that name one of them."""
        moments = [request.at_s for request in requests if self.name in request.wants]
        if not moments or draw.random() < 0.6:
            return []
        at_s = round(max(0.0, max(moments) - draw.uniform(0.2, _NOTICED_S)), 4)
        for_s = draw.choice([3.0, 12.0, 12.0])
        return [Fault(when=Moment(at_s), kind="drain node", target=draw.randrange(8), for_s=for_s)]

    def apply(self, value: int, request: Request, asked: Asked) -> None:
        asked.arguments["data_parallel_rank"] = value

    def excuses(self, value: int, record: Record, error: BaseException, history: History) -> bool:
        """A rank that is given up doesn't come back."""
        has_few_restarts = "max_rank_restarts" in history.options
        return history.has_broken and has_few_restarts and isinstance(error, InvalidRequest)


KIND = _Rank()
