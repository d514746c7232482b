"""Checkpoints of the model: reloads, and other names for weights."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raycore.llm import AsyncLLM
from simulation.cluster.anywhere import MODEL
from simulation.cluster.operations.conditions import ASLEEP, can_change_weights, can_read_weights, updating
from simulation.cluster.operations.contract import Capability, History, may_refuse, operation
from simulation.cluster.operations.pauses import maybe_paused
from simulation.cluster.records import Deed
from simulation.scenario import Operation
from simulation.worker import model
from simulation.worker.weights import FIRST_DAMAGED

_DAMAGED_SHARE = 0.15


def path_of(number: int) -> str:
    """Another name for the directory of the model's files, which simulated workers take for other weights."""
    return "/".join([MODEL, *[f"../{Path(MODEL).name}"] * number])


class Checkpoints(Capability):
    """See the module."""

    kinds = ("reload_weights", "update_weight_version")
    weight = 3
    survives_losses = True

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        number = draw.randrange(1, 20)
        if draw.random() < 0.25:
            return [operation(at_s, "update_weight_version", new_version=f"name {draw.randrange(1000)}")]
        arguments = {"weight_version": f"checkpoint {number}"} if draw.random() < 0.9 else {}
        if draw.random() < 0.85:
            # files of a few of them are damaged
            apart = random.Random(f"damaged checkpoints {number} {at_s}")
            is_damaged = apart.random() < _DAMAGED_SHARE
            arguments["checkpoint"] = FIRST_DAMAGED + apart.randrange(len(model.UNITS)) if is_damaged else number
        elif draw.random() < 0.5:
            arguments["checkpoint"] = -1  # which isn't there
        made = maybe_paused(draw, [operation(at_s, "reload_weights", **arguments)])
        return [*made, operation(at_s + 1.0, "weights_checksum")]

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        arguments = dict(deed.operation.arguments)
        if "checkpoint" in arguments:
            number = arguments.pop("checkpoint")
            arguments["path"] = "/no/such/directory" if number < 0 else path_of(number)
        await getattr(llm, deed.operation.kind)(**arguments)
        deed.version = await llm.get_weight_version()

    def cures(self, llm: AsyncLLM, performed: Iterable[str]) -> list[Operation]:
        """Ranks without weights get some, from a trainer if there are no files of the model."""
        if not any(rank.state == "stale" for rank in llm.ranks):
            return []
        if llm.config.model.load_format != "dummy":
            return [operation(0.0, "reload_weights", checkpoint=20, weight_version="checkpoint 20")]
        return [
            operation(0.0, "start_weight_update"),
            operation(0.0, "update_weights", checkpoint="trainer 20", names=list(model.UNITS)),
            operation(0.0, "finish_weight_update", weight_version="update 20"),
        ]

    def refuses(self, deed: Deed, history: History) -> bool | None:
        if deed.operation.kind == "update_weight_version":
            return False
        can_change = can_change_weights(history) and can_read_weights(history.options)
        number = deed.operation.arguments.get("checkpoint", 0)
        if number < 0 or number >= FIRST_DAMAGED or not can_change:
            return True
        return may_refuse((updating(history), False), (ASLEEP["weights"], False), history=history, deed=deed)
