"""Resets of what ranks keep of earlier requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from raycore.llm import AsyncLLM
from simulation.cluster.operations.contract import Capability, History, is_done, operation
from simulation.cluster.records import Deed
from simulation.scenario import Operation


class Caches(Capability):
    """See the module."""

    kinds = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        kind = draw.choice(["reset_prefix_cache", "reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache"])
        arguments = {"reset_running_requests": True} if kind == "reset_prefix_cache" and draw.random() < 0.5 else {}
        return [operation(at_s, kind, **arguments)]

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        deed.result = await getattr(llm, deed.operation.kind)(**deed.operation.arguments)

    def problems(self, deed: Deed, history: History) -> Iterator[str]:
        if is_done(deed) and deed.operation.arguments.get("reset_running_requests") and deed.result is not True:
            yield f"returned {deed.result}, though running requests are reset"
