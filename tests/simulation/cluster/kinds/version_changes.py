"""Requests that fail once the weights change while they run. Another name for the same weights changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from raycore.errors import WeightVersionChanged
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.cluster.operations.contract import History, end_of, is_refused, operation
from simulation.cluster.records import Deed, Record
from simulation.scenario import Operation, Request

_CHANGES = ("finish_weight_update", "reload_weights", "wake_up")
"""Calls that may give the engine other weights. A sleep may have dropped those of before."""
_NAMING = "update_weight_version"
_MANY_TOKENS = 16
"""A request that makes fewer is over before weights can change."""


class _VersionChange(Kind):
    name = "version change"
    engine_share = 0.2
    excludes = ("pooled", "refused")

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return draw.choice(["fail", "fail", "continue"])

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        asked.params["on_version_change"] = value

    def operations(self, draw: random.Random, requests: Iterable[Request]) -> list[Operation]:
        """Weights get another name, or are other ones, just after a long request has come."""
        moments = [each.at_s for each in requests if self.name in each.wants and each.max_tokens >= _MANY_TOKENS]
        if not moments or draw.random() < 0.3:
            return []
        at_s, number = draw.choice(moments) + draw.uniform(0.0, 0.1), draw.randrange(1000)
        if draw.random() < 0.7:
            return [operation(at_s, _NAMING, new_version=f"another name {number}")]
        return [
            operation(at_s, "reload_weights", checkpoint=number % 20, weight_version=f"another checkpoint {number}")
        ]

    def excuses(self, value: str, record: Record, error: BaseException, history: History) -> bool:
        if value != "fail" or not isinstance(error, WeightVersionChanged):
            return False
        return any(_changes_during(deed, record) for deed in history.deeds)

    def problems_at_end(self, value: str, record: Record, history: History) -> Iterator[str]:
        named = {deed.operation.arguments["new_version"] for deed in history.deeds if deed.operation.kind == _NAMING}
        for sequence in record.sequences if value == "fail" else ():
            for (before, _, _), (after, _, _) in pairwise(sequence.versions):
                if after not in named:
                    yield f"went on though weights {after!r} came after {before!r}"


def _changes_during(deed: Deed, record: Record) -> bool:
    assert record.submitted_s is not None, "it has failed"
    assert record.ended_s is not None
    return (
        deed.operation.kind in _CHANGES
        and not is_refused(deed)
        and deed.began_s <= record.ended_s
        and end_of(deed) >= record.submitted_s
    )


KIND = _VersionChange()
