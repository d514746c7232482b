"""`GET /fault_tolerance/status`: which ranks are well, in the form in which vLLM tells it to what watches a cluster."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from raycore.server.contract.handlers import answers
from raycore.server.contract.service import Context
from raycore.status import RankState

Health = Literal["healthy", "paused", "unhealthy", "dead"]


class RankHealth(BaseModel):
    id: int
    status: Health


class FaultToleranceStatus(BaseModel):
    total_engines: int
    engines: list[RankHealth]


_HEALTH: dict[RankState, Health] = {
    "serving": "healthy",
    "leaving": "healthy",
    "paused": "paused",
    "asleep": "paused",
    "starting": "unhealthy",
    "stale": "unhealthy",
    "restarting": "unhealthy",
    "unplaced": "unhealthy",
    "gone": "dead",
}


@answers(FaultToleranceStatus, errors=(500, 503))
def fault_tolerance_status(context: Context) -> dict[str, Any]:  # not async: an API server asks the driver, and waits
    """Whether each data-parallel rank is healthy, paused, dead, or unhealthy: it starts, is being replaced, or waits
    for weights."""
    engines = [{"id": rank.dp_rank, "status": _HEALTH[rank.state]} for rank in context.engine.read_metrics().ranks]
    return {"total_engines": len(engines), "engines": engines}
