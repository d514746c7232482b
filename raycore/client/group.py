"""All clients of one engine together: that of the engine's own program, and those of other processes.

The supervisor tells only the program of ranks. The program passes that on to all clients, and answers for them all.
Clients in other processes are represented by `RemoteClient`s, which never block. Knows no Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Protocol

from raycore.client.client import EngineClient, LinkView
from raycore.engine.rank_events import EngineLost, LossExplained, RankEvent, RanksLost, RankUp
from raycore.messages import NO_LOAD, LoadView
from raycore.metrics.counts import RankCounts, total

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Beyond the time that it has for its work, a remote client may take this long to answer."""


class RemoteClient(Protocol):
    """A client in another process. No call blocks. The client is told of events in the order of the calls."""

    client_index: int
    """Its own: no two clients of an engine ever have the same."""

    def on_rank_event(self, event: RankEvent) -> None:
        """Ranks have come or gone, or it is known why."""
        ...

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float) -> Future[Any]:
        """The ranks are about to be stopped. Done once this client needs nothing of them any longer."""
        ...

    def drain(self, timeout_s: float) -> Future[bool]:
        """Take nothing new. Done when nothing is under way, or after `timeout_s`; tells which."""
        ...

    def abort_all(self) -> None:
        """Have every caller get what there is."""
        ...

    @property
    def num_unfinished_requests(self) -> int:
        """Requests under way, as last heard of it."""
        ...

    @property
    def num_waiting_for_rank(self) -> int:
        """Those of them that no rank has, as last heard of it."""
        ...

    def counts(self) -> dict[int, RankCounts]:
        """What it has counted of the ranks, as last heard of it."""
        ...

    def num_own(self, dp_rank: int) -> int:
        """Its requests on a rank, as last heard of it."""
        ...

    def load(self, dp_rank: int) -> LoadView:
        """The rank's load, as it last heard it."""
        ...


class ClientGroup:
    """A `RankListener` of the supervisor's. Thread-safe."""

    def __init__(self, own: EngineClient) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._remote: list[RemoteClient] = []
        self._ranks: dict[int, RankUp] = {}
        """By dp_rank, those that serve: what a client that joins is told."""
        self._end: EngineLost | None = None
        self._counts_of_gone: dict[int, RankCounts] = {}
        self._is_draining = False

    def join(self, client: RemoteClient) -> None:
        """Tell it of the ranks, now and from now on."""
        with self._lock:
            self._remote.append(client)
            for event in self._ranks.values():
                client.on_rank_event(event)
            if self._is_draining:
                client.drain(0.0)
            if self._end is not None:
                client.on_rank_event(self._end)

    def leave(self, client: RemoteClient) -> None:
        """Its process has ended: the ranks drop what it had there. Idempotent."""
        with self._lock:
            if client in self._remote:
                self._remote.remove(client)
                self._counts_of_gone = total([self._counts_of_gone, client.counts()])
        self._own.forget_client(client.client_index)

    # ---- ranks come and go: see `RankListener`

    def on_rank_event(self, event: RankEvent) -> None:
        """All clients are told."""
        with self._lock:
            match event:
                case RankUp():
                    self._ranks[event.dp_rank] = event
                case RanksLost():
                    self._remove(event.dp_ranks)
                case EngineLost():
                    self._end = event
                case LossExplained():
                    pass
            for client in self._remote:
                client.on_rank_event(event)
        self._own.on_rank_event(event)

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float) -> None:
        """Returns once no client needs the ranks, or some while after `timeout_s`."""
        with self._lock:
            self._remove(dp_ranks)
            waiting = [client.ranks_leaving(dp_ranks, timeout_s) for client in self._remote]
        deadline_s = time.monotonic() + timeout_s + _ANSWER_S
        self._own.ranks_leaving(dp_ranks, timeout_s)
        _wait(waiting, deadline_s)

    def is_busy(self, dp_rank: int) -> bool:
        """Whether any client has a request on the rank."""
        return self._own.is_busy(dp_rank) or any(client.num_own(dp_rank) for client in self._remotes())

    # ---- all clients' requests

    @property
    def num_unfinished_requests(self) -> int:
        """Requests under way; those of other processes as far as is known here."""
        return self._own.num_unfinished_requests + sum(client.num_unfinished_requests for client in self._remotes())

    def drain(self, timeout_s: float) -> bool:
        """Have all clients refuse what comes from now on, and wait for what is under way.

        Returns: whether all of it has finished.
        """
        with self._lock:
            self._is_draining = True
            waiting = [client.drain(timeout_s) for client in self._remote]
        deadline_s = time.monotonic() + timeout_s + _ANSWER_S
        own_is_done = self._own.drain(timeout_s)
        return all([own_is_done, *_wait(waiting, deadline_s)])

    def abort_all(self) -> None:
        """Have every caller of every client get what there is, with the finish reason `abort`."""
        for client in self._remotes():
            client.abort_all()
        self._own.abort_all()

    @property
    def num_waiting_for_rank(self) -> int:
        """Requests that no rank has, because none serves."""
        return self._own.num_waiting_for_rank + sum(client.num_waiting_for_rank for client in self._remotes())

    def counts(self) -> dict[int, RankCounts]:
        """What all clients have counted of the ranks, those that are gone included, by dp_rank."""
        with self._lock:
            parts = [self._counts_of_gone, *(client.counts() for client in self._remote)]
        return total([self._own.counts(), *parts])

    def links(self) -> dict[int, LinkView]:
        """The ranks that serve, by dp_rank, with their loads as far as they are known here: none is asked."""
        remote = self._remotes()
        return {
            dp_rank: LinkView(link.is_leaving, _combined([link.load, *(client.load(dp_rank) for client in remote)]))
            for dp_rank, link in self._own.links().items()
        }

    def _remotes(self) -> list[RemoteClient]:
        with self._lock:
            return list(self._remote)

    def _remove(self, dp_ranks: Sequence[int]) -> None:
        for dp_rank in dp_ranks:
            self._ranks.pop(dp_rank, None)


def _combined(loads: Sequence[LoadView]) -> LoadView:
    """A rank's load from what it said to several clients: one without requests there hasn't heard of it lately."""
    return max(loads, key=lambda load: load.num_running + load.num_waiting, default=NO_LOAD)


def _wait(waiting: Sequence[Future[Any]], deadline_s: float) -> list[Any]:
    """The results; False for those that have none by then, because their process has ended or doesn't answer."""
    futures.wait(waiting, max(0.0, deadline_s - time.monotonic()))
    return [future.done() and future.exception() is None and future.result() for future in waiting]
