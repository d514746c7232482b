"""Reports from an API server's process to the driver."""

from __future__ import annotations

import msgspec

from raycore.messages import NO_LOAD, LoadView
from raycore.metrics.counts import RankCounts
from raycore.server.http.counts import HttpCounts
from raycore.server.multi_process.driver_calls import DriverCall


class RankView(msgspec.Struct, frozen=True, array_like=True):
    """One client's view of a rank."""

    num_own: int = 0
    """Number of this client's requests on the rank."""
    load: LoadView = NO_LOAD
    """The rank's load, from the requests of all clients, as the rank last reported it."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What an API server says of itself. A report is sent when it differs from the previous report."""

    num_unfinished: int = 0
    ranks: dict[int, RankView] = {}
    """The ranks on which the API server has requests, by dp_rank."""
    num_waiting_for_rank: int = 0
    counts: dict[int, RankCounts] = {}
    """Counts since the server started, by dp_rank, of the ranks whose counts have changed since they were reported."""
    http: HttpCounts = msgspec.field(default_factory=HttpCounts)
    """HTTP counts since the server started."""
    broken: list[tuple[int, str]] = []
    """(dp_rank, reason) of output streams that broke on ranks not known to be lost. Each stream is reported once."""
    calls: list[DriverCall] = []
    """New calls on the driver's engine or adapters. Each is reported once."""
