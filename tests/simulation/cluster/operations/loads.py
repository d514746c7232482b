"""Calls of workers' own methods: `load_weights`, checksums, and a failure that comes with a change of weights."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycore.errors import EngineDeadError
from raycore.llm import AsyncLLM
from simulation.cluster.operations.conditions import can_change_weights
from simulation.cluster.operations.contract import Capability, History, end_of, operation
from simulation.cluster.records import Deed
from simulation.scenario import Operation
from simulation.worker import model


class Loads(Capability):
    """See the module."""

    kinds = ("load_weights", "weights_checksum", "break_worker")
    weight = 2

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        num_ranks = options["data_parallel_size"]
        kind = draw.choice(self.kinds)
        if kind == "load_weights":
            number = draw.getrandbits(60)
            return [operation(at_s, kind, name=draw.choice(model.UNITS), number=number)]
        if kind == "break_worker":
            return [
                operation(
                    at_s,
                    kind,
                    dp_rank=draw.randrange(num_ranks),
                    worker=draw.choice([0, 0, 1]),
                    after=draw.randrange(6),
                )
            ]
        return [operation(at_s, kind)]

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        kind, arguments = deed.operation.kind, deed.operation.arguments
        if kind == "load_weights":
            deed.version = await llm.get_weight_version()
            deed.result = await llm.collective_rpc("load_weights", args=([(arguments["name"], arguments["number"])],))
        elif kind == "break_worker":
            await llm.collective_rpc(_break, args=tuple(arguments[each] for each in ("dp_rank", "worker", "after")))
        else:
            deed.version = await llm.get_weight_version()
            found = await llm.collective_rpc("weights_checksum")
            # ranks that wait for weights are asked, too
            deed.result = None if any(rank.state == "stale" for rank in llm.ranks) else found

    def refuses(self, deed: Deed, history: History) -> bool | None:
        if deed.operation.kind != "load_weights" or can_change_weights(history):
            return False
        return None if deed.result == [] else True  # no rank serves that could refuse it

    def excuses(self, deed: Deed, error: BaseException, history: History) -> bool:
        is_leaving = isinstance(error, EngineDeadError) and any(
            each.operation.kind == "scale" and each.began_s <= end_of(deed) and end_of(each) >= deed.began_s
            for each in history.deeds
        )
        return is_leaving or super().excuses(deed, error, history)


def _break(worker: Any, dp_rank: int, number: int, after: int) -> None:
    """Have a change of a worker's weights fail when so many parts have changed."""
    if (worker.rank.dp_rank, worker.rank.worker) == (dp_rank, number):
        worker.break_after(after)
