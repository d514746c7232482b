"""An engine's metrics at one moment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from raycore.messages import EngineInfo
from raycore.metrics.counts import RankCounts
from raycore.status import RankStatus


@dataclass(frozen=True)
class MetricsView:
    """What an engine's program knows of the ranks, without querying them."""

    ranks: list[RankStatus]
    """The current status of each rank; empty after the engine was shut down."""
    counts: dict[int, RankCounts]
    """Sums of all clients' counts since the engine's start, by dp_rank. Includes ranks that are gone."""
    infos: list[EngineInfo]
    """The `EngineInfo` of each rank that is up."""
    num_waiting_for_rank: int
    """Requests that wait because no rank is serving."""

    def numbered_from(self, first_rank: int) -> MetricsView:
        """Return this view with other numbers for ranks: `first_rank` for rank 0, and so on."""
        if not first_rank:
            return self
        return MetricsView(
            [dataclasses.replace(rank, dp_rank=first_rank + rank.dp_rank) for rank in self.ranks],
            {first_rank + dp_rank: counts for dp_rank, counts in self.counts.items()},
            [replace(info, dp_rank=first_rank + info.dp_rank) for info in self.infos],
            self.num_waiting_for_rank,
        )
