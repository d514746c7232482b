"""Requests with an adapter. One adapter can't be loaded, which is found out on the rank; another one isn't there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raycore.errors import InvalidAdapter, RequestFailed
from raycore.lora.request import LoRARequest
from simulation.cluster.kinds.kind import Asked, Kind, Seen
from simulation.cluster.operations.adapters import Adapters
from simulation.ray.host import MISSING
from simulation.scenario import Operation, Request
from simulation.worker.preparation import BROKEN

_BROKEN, _MISSING = 5, 6


def _adapter(number: int) -> LoRARequest:
    folder = {_BROKEN: BROKEN, _MISSING: MISSING}.get(number, "adapters")
    return LoRARequest(f"adapter {number}", number, f"{folder}/{number}")


class _Adapter(Kind):
    name = "adapter"
    engine_share = 0.3

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"enable_lora": True, "max_loras": draw.choice([1, 2]), "max_cpu_loras": 3}

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> int:
        number = draw.choice([1, 1, 2, 3, 4, _BROKEN, _MISSING])
        # what isn't read could fail the request before what can't be compiled, or after
        return 1 if number == _BROKEN and request.wants.get("constraint") == [] else number

    def operations(self, draw: random.Random, requests: Iterable[Request]) -> list[Operation]:
        if draw.random() < 0.5:
            return []
        return Adapters().draw(draw, draw.uniform(0.0, 3.0), {"enable_lora": True})

    def apply(self, value: int, request: Request, asked: Asked) -> None:
        asked.arguments["lora_request"] = asked.engine["lora"] = _adapter(value)
        if value == _BROKEN:
            asked.error = RequestFailed, f"the adapter in {BROKEN}/{value} can't be read"
        elif value == _MISSING:
            asked.error = InvalidAdapter, f"{MISSING}/{value}"

    def problems(self, value: int, seen: Seen) -> Iterator[str]:
        said = seen.record.adapter
        if seen.is_whole and said != _adapter(value) and "pooled" not in seen.record.request.wants:
            yield f"its output names the adapter {said}"


KIND = _Adapter()
