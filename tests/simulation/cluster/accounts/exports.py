"""What Ray exports of an engine: the same as the engine says of itself, as often as it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycore.metrics.catalog import COUNTERS, GAUGES
from simulation.cluster.accounts.account import Account
from simulation.ray.metrics import recorded

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM


class Exports(Account):
    """Ray's gauges and counters. They lag behind by one interval, in which a rank's counts may begin again."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        if not self.run.scenario.exports_metrics or llm._client.failure is not None:
            return
        exported = recorded()
        yield from (f"Ray refused to record {each}" for each in exported.refused[:1])
        for dp_rank, counts in llm.read_metrics().counts.items():
            for name, _, field in COUNTERS:
                own = float(getattr(counts, field))
                told = sum(
                    value
                    for (each, tags), value in exported.counters.items()
                    if each == name.replace("vllm:", "raycore_") and dict(tags)["engine"] == str(dp_rank)
                )
                if own != told:
                    yield f"dp_rank {dp_rank} counts {own:g} {name}, and Ray exports {told:g}"
        statuses = {str(rank.dp_rank): rank for rank in llm.ranks}
        for name, _, value_of in GAUGES:
            told = {
                dict(tags)["engine"]: value
                for (each, tags), value in exported.gauges.items()
                if each == name.replace("vllm:", "raycore_")
            }
            own = {dp_rank: float(value_of(rank)) for dp_rank, rank in statuses.items()}
            if told != dict.fromkeys(told, 0.0) | own:
                yield f"the ranks' {name} are {own}, and Ray exports {told}"
