"""Requests that are added, and whose outputs are then taken, rather than iterated over."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

from raycore.llm import AsyncLLM
from raycore.sampling_params import SamplingParams
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.cluster.records import Record
from simulation.scenario import Request


async def _add(llm: AsyncLLM, asked: Asked, record: Record) -> AsyncIterator[Any]:
    params = SamplingParams(**asked.params)
    priority = record.request.priority
    stream = await llm.add_request(record.name, asked.prompt, params, priority=priority, **asked.arguments)
    try:
        while not stream.is_finished:
            yield await stream.get()
    finally:
        stream.close()


class _Added(Kind):
    name = "added"
    engine_share = 0.2
    excludes = ("pieces", "pooled", "refused")

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> bool:
        return True

    def apply(self, value: bool, request: Request, asked: Asked) -> None:
        asked.perform = _add


KIND = _Added()
