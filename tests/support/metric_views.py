"""An engine's numbers, made up for tests."""

from __future__ import annotations

from raycore.messages import EngineInfo
from raycore.metrics.counts import RankCounts
from raycore.metrics.view import MetricsView
from raycore.status import RankStatus


def make_view(num_ranks: int = 1, **status) -> MetricsView:
    """Ranks that serve, with nothing counted."""
    return MetricsView(
        ranks=[RankStatus(dp_rank, "serving", ["node"], pid=7, **status) for dp_rank in range(num_ranks)],
        counts={dp_rank: RankCounts.empty(1000) for dp_rank in range(num_ranks)},
        infos=[EngineInfo(dp_rank, 7, "node", 64, 16, 1000, "float32", {}, [7]) for dp_rank in range(num_ranks)],
        num_waiting_for_rank=0,
    )
