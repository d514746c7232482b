"""Everything there is to show of an engine, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from raycore.messages import EngineInfo
from raycore.metrics.counts import RankCounts
from raycore.status import RankStatus


@dataclass(frozen=True)
class MetricsView:
    """What an engine's program knows of its ranks, without asking them."""

    ranks: list[RankStatus]
    """As they are; none once the engine was shut down."""
    counts: dict[int, RankCounts]
    """What was counted since the start, by dp_rank; ranks that have gone are among them."""
    infos: list[EngineInfo]
    """Of the ranks that are up."""
    num_waiting_for_rank: int
    """Requests that no rank has, because none serves."""
