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
    """The rank has started and accepts requests."""

    dp_rank: int
    actor: DPEngineCoreActor
    info: EngineInfo


@dataclass(frozen=True)
class RanksLost:
    """The ranks have ended, and their state is lost."""

    dp_ranks: Sequence[int]
    loss: int
    """Identifies this loss. A `LossExplained` event with the same number follows."""


@dataclass(frozen=True)
class LossExplained:
    """The cause of an earlier `RanksLost` event. A separate event, because finding the cause can take a few seconds."""

    loss: int
    error: EngineDeadError


@dataclass(frozen=True)
class EngineLost:
    """No rank is left, and no new rank will be started."""

    error: EngineDeadError


RankEvent = RankUp | RanksLost | LossExplained | EngineLost


class RankListener(Protocol):
    """Receives rank events, on the supervisor's threads. Implemented by classes that send requests to ranks."""

    def on_rank_event(self, event: RankEvent) -> None:
        """Handle an event. Implementations must return quickly, because the supervisor waits for them."""
        ...

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        """Stop sending requests to ranks that go out of service. Returns when no request needs these ranks any more.

        Args:
            timeout_s: how long requests may take that are on the ranks. The rest of them move to other ranks.
            come_back: whether ranks with these numbers will serve again. If so, requests for just these ranks go to
                others meanwhile, as those for lost ranks do. Otherwise they are refused.
        """
        ...

    def is_busy(self, dp_rank: int) -> bool:
        """Whether unfinished requests of this listener are on the rank."""
        ...
