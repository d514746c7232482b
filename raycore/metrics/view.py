"""An engine's metrics at one moment."""

from __future__ import annotations

from dataclasses import dataclass

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
