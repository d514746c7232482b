"""Updates of weights by a trainer, which brings parts in several calls, or gives the update up."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from raycore.llm import AsyncLLM
from simulation.cluster.operations.conditions import ASLEEP, can_change_weights, updating
from simulation.cluster.operations.contract import Capability, History, end_of, is_done, may_refuse, operation
from simulation.cluster.operations.pauses import maybe_paused
from simulation.cluster.records import Deed
from simulation.scenario import Operation
from simulation.worker import model

_UNKNOWN = "no such part"


class Updates(Capability):
    """See the module."""

    kinds = (
        *("start_weight_update", "update_weights", "finish_weight_update", "cancel_weight_update"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    )
    weight = 4
    survives_losses = True
    has_one_operator = True

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        made, number = [operation(at_s, "start_weight_update")], draw.randrange(1000)
        if draw.random() < 0.2:
            made = [operation(at_s, "init_weight_transfer_engine", request={"init_info": {"port": 1}}), *made]
        names = list(model.UNITS) if draw.random() < 0.5 else draw.sample(model.UNITS, draw.randint(1, 3))
        split = draw.randrange(len(names) + 1)
        for some in (names[:split], names[split:]):
            at_s += draw.choice([0.0, draw.uniform(0.0, 0.5)])
            arguments = {"checkpoint": f"trainer {number}", "names": some}
            if draw.random() < 0.1:
                arguments |= {"names": [*some, _UNKNOWN]}
            if draw.random() < 0.15:  # one of the workers can't take it
                arguments |= {"wrong_for": draw.randrange(4)}
            made.append(operation(at_s, "update_weights", **arguments))
        at_s += draw.choice([0.0, draw.uniform(0.0, 0.5)])
        if draw.random() < 0.2:  # which has to be refused
            made.append(operation(at_s, "reload_weights", checkpoint=21, weight_version="checkpoint 21"))
        name = {"weight_version": f"update {number}"} if draw.random() < 0.9 else {}
        made.append(operation(at_s, "finish_weight_update", **name))
        if draw.random() < 0.3:
            made[-1] = operation(at_s, "cancel_weight_update")
        return [*maybe_paused(draw, made), operation(at_s + 1.0, "weights_checksum")]

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        kind, arguments = deed.operation.kind, deed.operation.arguments
        if kind != "update_weights":
            await super().perform(llm, deed)
            if kind in ("start_weight_update", "finish_weight_update"):
                deed.version = await llm.get_weight_version()
            return
        info = {"checkpoint": arguments["checkpoint"], "names": arguments["names"]}
        if "wrong_for" not in arguments:
            await llm.update_weights({"update_info": info})
            return
        # one for each worker of more ranks than there can be
        infos = [info] * (8 * llm.config.parallel.world_size)
        infos[arguments["wrong_for"]] = info | {"names": [_UNKNOWN]}
        await llm.update_weights({"update_info": infos})

    def cures(self, llm: AsyncLLM, performed: Iterable[str]) -> list[Operation]:
        is_held = any(rank.state in ("paused", "stale") for rank in llm.ranks) and "start_weight_update" in performed
        return [operation(0.0, "cancel_weight_update")] if is_held else []

    def refuses(self, deed: Deed, history: History) -> bool | None:
        kind, is_updating = deed.operation.kind, updating(history)
        if kind == "cancel_weight_update":
            return False
        if kind.endswith("transfer_engine"):
            return may_refuse((is_updating, False), history=history, deed=deed)
        if kind == "start_weight_update" and not can_change_weights(history):
            return True
        if kind == "start_weight_update":
            return may_refuse((is_updating, False), (ASLEEP["weights"], False), history=history, deed=deed)
        if may_refuse((is_updating, True), history=history, deed=deed):
            return True
        if _UNKNOWN in deed.operation.arguments.get("names", ()):
            return None if "wrong_for" in deed.operation.arguments or history.has_broken else True
        # ranks that had no weights need all; a single worker that refuses is all of them
        return None

    def excuses(self, deed: Deed, error: BaseException, history: History) -> bool:
        return (
            "wrong_for" in deed.operation.arguments
            or _may_meet_restarts(deed, history)
            or super().excuses(deed, error, history)
        )

    def holds(self, deed: Deed, history: History) -> Iterable[tuple[float, float]]:
        if deed.operation.kind == "start_weight_update" and is_done(deed):
            yield end_of(deed), updating(history).until(history, deed)


def _may_meet_restarts(deed: Deed, history: History) -> bool:
    """Whether ranks that share experts may be restarted during an update, because a change of their number meets it."""
    if not history.options.get("enable_expert_parallel"):
        return False
    return any(
        each.operation.kind in ("scale", "scale_elastic_ep")
        and each.began_s <= end_of(deed)
        and (updating(history).may_hold(history, each) or end_of(each) >= deed.began_s)
        for each in history.deeds
    )
