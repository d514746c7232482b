"""What becomes of an engine's ranks, as its supervisor tells all clients, those of other processes included."""

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
    """The rank serves."""

    dp_rank: int
    actor: DPEngineCoreActor
    info: EngineInfo


@dataclass(frozen=True)
class RanksLost:
    """The ranks are gone, with what they had."""

    dp_ranks: Sequence[int]
    loss: int
    """A running number. The `LossExplained` with the same number follows."""


@dataclass(frozen=True)
class LossExplained:
    """Why ranks are gone. It takes a moment to find out, so it comes after the loss."""

    loss: int
    error: EngineDeadError


@dataclass(frozen=True)
class EngineLost:
    """No rank is left, and none will come."""

    error: EngineDeadError


RankEvent = RankUp | RanksLost | LossExplained | EngineLost


class RankListener(Protocol):
    """Whoever hands work to ranks. Called from the supervisor's threads."""

    def on_rank_event(self, event: RankEvent) -> None:
        """Take note of an event. Must not block for long."""
        ...

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float) -> None:
        """The ranks are about to be stopped: give them nothing more. Returns once they are no longer needed.

        What they don't finish within `timeout_s` is handed to others.
        """
        ...

    def is_busy(self, dp_rank: int) -> bool:
        """Whether the rank has work that its caller waits for."""
        ...
