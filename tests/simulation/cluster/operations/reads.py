"""Questions that change nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from raycore.llm import AsyncLLM
from simulation.cluster.operations.conditions import ASLEEP, PAUSED
from simulation.cluster.operations.contract import Capability, History, is_done, operation
from simulation.cluster.records import Deed
from simulation.scenario import Operation


class Reads(Capability):
    """See the module."""

    kinds = ("check_health", "is_paused", "is_sleeping", "get_weight_version", "list_loras", "read_figures")
    weight = 2

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        return [operation(at_s + draw.uniform(0.0, 1.0), draw.choice(self.kinds)) for _ in range(draw.randint(1, 3))]

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        if deed.operation.kind == "read_figures":
            deed.result = len(llm.ranks), len(llm.get_metrics()), llm.num_unfinished_requests
        else:
            deed.result = await getattr(llm, deed.operation.kind)()

    def problems(self, deed: Deed, history: History) -> Iterator[str]:
        if not is_done(deed):
            return
        if deed.operation.kind in ("is_paused", "is_sleeping"):
            is_so = [each.must_hold(history, deed) for each in (PAUSED, *ASLEEP.values())]
            if any(is_so) and deed.result is not True:
                yield f"returned {deed.result} in a pause"
