"""Pauses, and sleeps with parts of the memory that wake up one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from raycore.activity import TAGS
from raycore.errors import RaycoreError
from raycore.llm import AsyncLLM
from simulation.cluster.operations.conditions import ASLEEP, PAUSED, RELOADING, can_change_weights, updating
from simulation.cluster.operations.contract import Capability, History, end_of, is_done, may_refuse, operation
from simulation.cluster.records import Deed
from simulation.scenario import Operation

_MODES = ("keep", "wait", "abort")
_CHANGES = frozenset(
    {
        *("pause_generation", "resume_generation", "sleep", "wake_up", "reload_weights"),
        *("start_weight_update", "update_weights", "finish_weight_update", "cancel_weight_update"),
    }
)
"""What ends the wait of a pause for requests."""


def maybe_paused(draw: random.Random, made: list[Operation]) -> list[Operation]:
    """Operations, now and then within a pause, or a sleep of which only the weights wake up before."""
    first_s, end_s = made[0].at_s, made[-1].at_s + draw.choice([0.0, draw.uniform(0.0, 0.5)])
    how = draw.choice(["running", "running", "pause", "sleep"])
    if how == "running":
        return made
    if how == "pause":
        pause = operation(first_s, "pause_generation", mode=draw.choice(_MODES))
        return [pause, *made, operation(end_s, "resume_generation")]
    reads = draw.choice([{}, {"reads_weights": False}])
    return [
        operation(first_s, "sleep", level=draw.choice([1, 2]), mode=draw.choice(_MODES)),
        operation(first_s, "wake_up", tags=["weights"], **reads),
        *made,
        operation(end_s, "wake_up"),
    ]


class Pauses(Capability):
    """See the module."""

    kinds = ("pause_generation", "resume_generation", "sleep", "wake_up")
    weight = 3
    survives_losses = True
    within_s = 2200.0
    """A pause may wait for requests, which take up to 900 s, after another one that does."""

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        until_s = at_s + draw.uniform(0.0, 1.0)
        if draw.random() < 0.5:
            arguments = {"mode": draw.choice(_MODES)} | ({"clear_cache": False} if draw.random() < 0.5 else {})
            end = draw.choice(["resume_generation", "resume_generation", "wake_up"])
            asked = [operation(until_s, "is_paused")] if draw.random() < 0.5 else []
            return [operation(at_s, "pause_generation", **arguments), *asked, operation(until_s, end)]
        level, mode = draw.choice([1, 2]), draw.choice(["abort", "abort", "keep", "wait"])
        sleep = operation(at_s, "sleep", level=level, mode=mode)
        drops = draw.random() < 0.25
        if not drops and draw.random() < 0.5:
            return [sleep, operation(until_s, "wake_up")]
        # what was dropped comes with an update, which needs the weights' memory
        tags = list(TAGS) if drops else draw.sample(TAGS, 2)
        first = operation(until_s, "wake_up", tags=tags[:1], **({"reads_weights": False} if drops else {}))
        return [sleep, first, operation(until_s + draw.uniform(0.0, 1.0), "wake_up", tags=tags[1:])]

    def cures(self, llm: AsyncLLM, performed: Iterable[str]) -> list[Operation]:
        is_mine = "pause_generation" in performed or "sleep" in performed
        return (
            [operation(0.0, "wake_up")] if is_mine and any(r.state in ("paused", "asleep") for r in llm.ranks) else []
        )

    def aborts(self, operation: Operation, name: str) -> bool:
        is_pause = operation.kind in ("pause_generation", "sleep")
        return is_pause and operation.arguments.get("mode", "abort") == "abort"

    def refuses(self, deed: Deed, history: History) -> bool | None:
        kind, arguments = deed.operation.kind, deed.operation.arguments
        asleep = [(each, False) for each in ASLEEP.values()]
        held = [(updating(history), False), (RELOADING, False)]
        if kind == "resume_generation":
            return may_refuse(*asleep, history=history, deed=deed)
        if kind == "wake_up":
            return not arguments.get("reads_weights", True) and not can_change_weights(history)
        waits = arguments.get("mode") == "wait"
        sleeps = kind == "sleep" and arguments.get("level", 1) > 0
        needs = (held if waits or sleeps else []) + (asleep if waits else [])
        return may_refuse(*needs, history=history, deed=deed)

    def excuses(self, deed: Deed, error: BaseException, history: History) -> bool:
        is_cancelled = (
            deed.operation.arguments.get("mode") == "wait"
            and type(error) is RaycoreError
            and "cancelled by another call" in str(error)
        )
        if is_cancelled:
            return any(
                each is not deed
                and each.operation.kind in _CHANGES
                and each.began_s <= end_of(deed)
                and end_of(each) >= deed.began_s
                for each in history.deeds
            )
        return super().excuses(deed, error, history)

    def holds(self, deed: Deed, history: History) -> Iterable[tuple[float, float]]:
        if deed.operation.kind in ("pause_generation", "sleep") and is_done(deed):
            yield end_of(deed), PAUSED.until(history, deed)
