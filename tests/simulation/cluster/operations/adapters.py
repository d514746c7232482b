"""Adapters that operators add, replace, pin and remove. What requests with an adapter get follows from these."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from raycore.errors import InvalidInput, RequestFailed, RpcTimeout
from raycore.llm import AsyncLLM
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest
from simulation.cluster.operations.conditions import ASLEEP
from simulation.cluster.operations.contract import NEVER_S, Capability, History, end_of, is_done, is_refused, operation
from simulation.cluster.records import Deed, Record
from simulation.scenario import Operation
from simulation.worker.preparation import BROKEN


class Adapters(Capability):
    """See the module."""

    kinds = ("add_lora", "remove_lora", "pin_lora")
    weight = 4

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        if not options.get("enable_lora"):
            return []
        made: list[Operation] = []
        for _ in range(draw.randint(1, 4)):
            number = draw.choice([1, 1, 2, 3])
            kind = draw.choice(["add_lora", "add_lora", "remove_lora", "pin_lora"])
            arguments: dict[str, Any] = {"lora_id": number}
            if kind == "add_lora":
                is_other = draw.random() < 0.6
                path = f"{BROKEN}/{number}" if draw.random() < 0.1 else f"adapters/{number}" + " again" * is_other
                arguments = {"number": number, "path": path, "load_inplace": draw.random() < 0.6}
            made.append(operation(at_s, kind, **arguments))
            at_s += draw.uniform(0.0, 0.5)
        return made

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        arguments = dict(deed.operation.arguments)
        if deed.operation.kind == "add_lora":
            number, path = arguments.pop("number"), arguments.pop("path")
            arguments = {"lora_request": LoRARequest(f"adapter {number}", number, path, **arguments)}
        deed.result = await getattr(llm, deed.operation.kind)(**arguments)

    def refuses(self, deed: Deed, history: History) -> bool | None:
        if deed.operation.kind == "add_lora" and deed.operation.arguments["path"].startswith(BROKEN):
            # on a rank that has just been lost, nobody finds out
            return None
        if deed.operation.kind == "remove_lora":
            return False
        return None  # it depends on which adapters are there, and whether there is room for another one

    def excuses(self, deed: Deed, error: BaseException, history: History) -> bool:
        return isinstance(error, RpcTimeout) or super().excuses(deed, error, history)

    def problems(self, deed: Deed, history: History) -> Iterator[str]:
        if is_refused(deed) and not isinstance(deed.error, InvalidInput):
            yield f"was refused by {deed.error!r}"
        if deed.operation.kind == "pin_lora" and is_done(deed) and ASLEEP["weights"].must_hold(history, deed):
            yield "pinned an adapter in an engine that sleeps"

    def fails(self, deed: Deed, record: Record, error: BaseException) -> bool:
        """Pinned adapters leave no room. The files of one that was replaced may be gone with a rank."""
        return "adapter" in record.request.wants and isinstance(error, RequestFailed)


@dataclass(frozen=True)
class _Setting:
    """That requests with an adapter's number may get the one in this directory from now on."""

    path: str
    began_s: float
    ended_s: float
    is_sure: bool


def variants(request: EngineRequest, record: Record, history: History) -> list[EngineRequest]:
    """A request with each of the adapters that it may have got."""
    if request.lora is None:
        return [request]
    paths = _paths_during(record, request.lora, history)
    return [replace(request, lora=replace(request.lora, lora_path=path)) for path in paths]


def _paths_during(record: Record, own: LoRARequest, history: History) -> list[str]:
    """The directories one of which a request's adapter has come from."""
    settings = [_Setting(own.lora_path, -NEVER_S, -NEVER_S, True)]
    for deed in history.deeds:
        arguments = deed.operation.arguments
        if deed.operation.kind == "remove_lora" and arguments["lora_id"] == own.lora_int_id:
            settings.append(_Setting(own.lora_path, deed.began_s, end_of(deed), is_done(deed)))
        if deed.operation.kind == "add_lora" and arguments["number"] == own.lora_int_id and not is_refused(deed):
            is_sure = is_done(deed) and deed.result is True
            settings.append(_Setting(arguments["path"], deed.began_s, end_of(deed), is_sure))
    assert record.submitted_s is not None, "it ran"
    end_s = NEVER_S if record.ended_s is None else record.ended_s
    found = [
        each.path
        for each in settings
        if each.began_s <= end_s
        and not any(
            other.is_sure and other.began_s >= each.ended_s and other.ended_s <= record.submitted_s
            for other in settings
            if other is not each
        )
    ]
    return list(dict.fromkeys(found))
