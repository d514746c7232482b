"""What an API server's process tells the engine's program."""

from __future__ import annotations

import msgspec

from raycore.messages import NO_LOAD, LoadView
from raycore.metrics.counts import RankCounts
from raycore.server.http_counts import HttpCounts


class RankShare(msgspec.Struct, frozen=True, array_like=True):
    """What one client knows of a rank."""

    num_own: int = 0
    """Its requests there."""
    load: LoadView = NO_LOAD
    """The rank's, all clients' requests together, as it last said."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """How an API server is. One is sent when it differs from the one before."""

    num_unfinished: int = 0
    ranks: dict[int, RankShare] = {}
    """By dp_rank: those on which it has requests."""
    num_waiting_for_rank: int = 0
    counts: dict[int, RankCounts] = {}
    """What it has counted since it started, by dp_rank."""
    http: HttpCounts = msgspec.field(default_factory=HttpCounts)
    """What it has counted of HTTP since it started."""
    broken: list[tuple[int, str]] = []
    """(dp_rank, why) of ranks whose output streams broke although they haven't been found lost. Not repeated."""
