"""The events by which an engine's supervisor tells all clients, in all processes, which ranks serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo

if TYPE_CHECKING:
    from raycore.engine.engine_actor import DPEngineCoreActor


@dataclass(frozen=True)
class RankUp:
    """The rank is in service."""

    dp_rank: int
    actor: DPEngineCoreActor
    info: EngineInfo


@dataclass(frozen=True)
class RanksLost:
    """The ranks are gone, with all their state."""

    dp_ranks: Sequence[int]
    loss: int
    """The number of this loss. A `LossExplained` with the same number follows."""


@dataclass(frozen=True)
class LossExplained:
    """The cause of a loss. Sent separately because it takes up to some seconds to find out."""

    loss: int
    error: EngineDeadError


@dataclass(frozen=True)
class EngineLost:
    """No rank is left, and none will be started."""

    error: EngineDeadError


RankEvent = RankUp | RanksLost | LossExplained | EngineLost


class RankListener(Protocol):
    """Receives rank events, on the supervisor's threads. Implemented by those that send requests to ranks."""

    def on_rank_event(self, event: RankEvent) -> None:
        """Handle an event. Must not block for long."""
        ...

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float) -> None:
        """Send no more requests to ranks that are about to be stopped. Returns once they are no longer needed.

        Requests that they don't finish within `timeout_s` seconds move to other ranks.
        """
        ...

    def is_busy(self, dp_rank: int) -> bool:
        """Whether the rank has unfinished requests."""
        ...
