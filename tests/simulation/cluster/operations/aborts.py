"""Aborts of requests by an operator: of one, or of all."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycore.llm import AsyncLLM
from simulation.cluster.operations.contract import Capability, operation
from simulation.cluster.records import Deed
from simulation.scenario import Operation


class Aborts(Capability):
    """See the module."""

    kinds = ("abort_requests", "abort")

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        wanted = [f"r{draw.randrange(8)}"] if draw.random() < 0.7 else None
        return [operation(at_s, "abort_requests", request_ids=wanted)]

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        arguments = deed.operation.arguments
        if deed.operation.kind == "abort":
            await llm.abort(arguments["request_ids"])
        else:
            deed.result = await llm.abort_requests(**arguments)

    def aborts(self, operation: Operation, name: str) -> bool:
        wanted = operation.arguments.get("request_ids")
        return wanted is None or name in wanted
