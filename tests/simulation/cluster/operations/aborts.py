"""Aborts of requests by an operator: of one, or of all."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.operations.contract import Capability, operation
from simulation.scenario import Operation


class Aborts(Capability):
    """See the module."""

    kinds = ("abort_requests",)

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        wanted = [f"r{draw.randrange(8)}"] if draw.random() < 0.7 else None
        return [operation(at_s, "abort_requests", request_ids=wanted)]

    def aborts(self, operation: Operation, name: str) -> bool:
        wanted = operation.arguments.get("request_ids")
        return wanted is None or name in wanted
