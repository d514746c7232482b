"""All clients of one engine: the client in the program that created the engine, and those in API server processes.

The supervisor talks only to the `ClientGroup`, which passes rank events on to all clients and combines their answers.
A `RemoteClient` stands for a client in another process. Its methods never block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from raycore.client.client import EngineClient, LinkView
from raycore.client.rank_connections import Sent
from raycore.engine.rank_events import EngineLost, LossExplained, RankEvent, RanksLost, RankUp
from raycore.messages import NO_LOAD, EngineInfo, LoadView
from raycore.metrics.counts import RankCounts, total
from raycore.system import Future, futures, threading, time

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""How long, in seconds, to wait for a remote client's answer after the timeout of the call has passed."""
_NO_LOSS = 0
"""The number of a loss of ranks that a client has never had requests on."""


_STUCK_S = 40.0
"""A client that takes so many seconds to answer is stuck. Its monitor replaces it sooner."""


class RankReply(NamedTuple):
    """A rank's reply when it has paused."""

    pid: int
    """The process id of the rank's engine."""
    num_sent: dict[int, int]
    """By client index: the number of batches with outputs that the rank has sent to the client."""


class RemoteClient(Protocol):
    """A client in another process. No method blocks. The client receives messages in the order of the method calls."""

    client_index: int
    """Unique among all clients that the engine ever had."""

    def on_rank_event(self, event: RankEvent) -> None:
        """Send a rank event to the client."""
        ...

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> Future[Any]:
        """Tell the client that these ranks go out of service: see `RankListener`.

        The future is done once the client no longer needs the ranks.
        """
        ...

    def drain(self, timeout_s: float) -> Future[bool]:
        """Have the client refuse new requests, and wait up to `timeout_s` seconds for the unfinished ones.

        The future's result is whether all of them finished in that time.
        """
        ...

    def abort_all(self) -> None:
        """Abort all requests of this client. Callers get the output so far, with the finish reason `abort`."""
        ...

    def abort_requests(self, request_ids: Sequence[str] | None) -> Future[int]:
        """Call `EngineClient.abort_groups`."""
        ...

    def forget_images(self) -> Future[None]:
        """Call `EngineClient.forget_images`."""
        ...

    def pause_new(self) -> Future[None]:
        """Call `EngineClient.pause_new`."""
        ...

    def wait_for_older(self) -> Future[bool]:
        """Call `EngineClient.wait_for_older`."""
        ...

    def complete_pause(self, sent: Sent, aborts: bool, timeout_s: float) -> Future[bool]:
        """Call `EngineClient.complete_pause`."""
        ...

    def resume_new(self) -> None:
        """Have the client pause no more requests: see `EngineClient.resume_new`."""
        ...

    @property
    def num_unfinished_requests(self) -> int:
        """Number of the client's unfinished requests, as last reported."""
        ...

    @property
    def num_waiting_for_rank(self) -> int:
        """Number of the client's requests that wait because no rank serves, as last reported."""
        ...

    def counts(self) -> dict[int, RankCounts]:
        """The client's counts for each rank, as last reported, by dp_rank."""
        ...

    def num_own(self, dp_rank: int) -> int:
        """Number of the client's requests on a rank, as last reported."""
        ...

    def load(self, dp_rank: int) -> LoadView:
        """A rank's load, as last reported by the rank to the client and by the client to this process."""
        ...


class ClientGroup:
    """All clients of an engine, as one `RankListener` for the supervisor. Thread-safe."""

    def __init__(self, own: EngineClient) -> None:
        self.on_rank_up: Callable[[EngineInfo], object] = lambda info: None
        """Called with what a rank reported when it started, whenever a rank comes into service. Must return quickly."""
        self._own = own
        self._lock = threading.Lock()
        self._remote: list[RemoteClient] = []
        self._ranks: dict[int, RankUp] = {}
        """The events of the ranks in service, by dp_rank, for clients that join later."""
        self._away: set[int] = set()
        """The ranks that aren't in service and may come back."""
        self._end: EngineLost | None = None
        self._counts_of_gone: dict[int, RankCounts] = {}
        self._is_draining = False
        self._is_paused = False

    def join(self, client: RemoteClient) -> None:
        """Add a client. It gets the events of the ranks in service, and all later events."""
        with self._lock:
            self._remote.append(client)
            if self._away:
                client.on_rank_event(RanksLost(sorted(self._away), _NO_LOSS))
            for event in self._ranks.values():
                client.on_rank_event(event)
            if self._is_paused:
                client.pause_new()
            if self._is_draining:
                client.drain(0.0)
            if self._end is not None:
                client.on_rank_event(self._end)

    def leave(self, client: RemoteClient) -> None:
        """Remove a client whose process has ended, and abort its requests. Idempotent."""
        with self._lock:
            if client in self._remote:
                self._remote.remove(client)
                self._counts_of_gone = total([self._counts_of_gone, client.counts()])
        self._own.forget_client(client.client_index)

    # ---- ranks come and go: see `RankListener`

    def on_rank_event(self, event: RankEvent) -> None:
        """Pass the event on to all clients."""
        with self._lock:
            match event:
                case RankUp():
                    self._ranks[event.dp_rank] = event
                    self._away.discard(event.dp_rank)
                    self.on_rank_up(event.info)
                case RanksLost():
                    self._remove(event.dp_ranks, come_back=True)
                case EngineLost():
                    self._end = event
                case LossExplained():
                    pass
            for client in self._remote:
                client.on_rank_event(event)
        self._own.on_rank_event(event)

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        """Tell all clients that these ranks go out of service.

        Returns once no client needs the ranks, but at the latest 5 s after `timeout_s`.
        """
        with self._lock:
            self._remove(dp_ranks, come_back)
            waiting = [client.ranks_leaving(dp_ranks, timeout_s, come_back) for client in self._remote]
        deadline_s = time.monotonic() + timeout_s + _ANSWER_S
        self._own.ranks_leaving(dp_ranks, timeout_s, come_back)
        _wait(waiting, deadline_s)

    def is_busy(self, dp_rank: int) -> bool:
        """Whether any client has a request on the rank."""
        return self._own.is_busy(dp_rank) or any(client.num_own(dp_rank) for client in self._remotes())

    # ---- all clients' requests

    @property
    def num_unfinished_requests(self) -> int:
        """Number of unfinished requests of all clients. Those of other processes count as last reported."""
        return self._own.num_unfinished_requests + sum(client.num_unfinished_requests for client in self._remotes())

    def drain(self, timeout_s: float) -> bool:
        """Have all clients refuse new requests, and wait up to `timeout_s` seconds for the unfinished ones.

        Returns: whether all of them finished in that time.
        """
        with self._lock:
            self._is_draining = True
            waiting = [client.drain(timeout_s) for client in self._remote]
        deadline_s = time.monotonic() + timeout_s + _ANSWER_S
        own_is_done = self._own.drain(timeout_s)
        return all([own_is_done, *_wait(waiting, deadline_s)])

    def abort_all(self) -> None:
        """Abort the requests of all clients. Callers get the output so far, with the finish reason `abort`."""
        for client in self._remotes():
            client.abort_all()
        self._own.abort_all()

    def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        """Abort the requests of all clients that `EngineClient.abort_groups` would abort. Returns how many there were.

        Those of a client that doesn't answer within 5 s don't count.
        """
        waiting = [client.abort_requests(request_ids) for client in self._remotes()]
        deadline_s = time.monotonic() + _ANSWER_S
        return self._own.abort_groups(request_ids) + sum(_wait(waiting, deadline_s))

    def forget_images(self) -> None:
        """Have all clients drop the images that they keep: see `EngineClient.forget_images`.

        Returns when all clients have, but at the latest after 5 s. A client that takes longer does it later.
        """
        waiting = [client.forget_images() for client in self._remotes()]
        self._own.forget_images()
        futures.wait(waiting, _ANSWER_S)

    # ---- while the engine is paused

    def pause_new(self) -> None:
        """Have all clients pause new requests: see `EngineClient.pause_new`.

        Returns when all clients do, but at the latest after 40 s. A client that takes so long is stuck, and is ended.
        """
        with self._lock:
            self._is_paused = True
            waiting = [client.pause_new() for client in self._remote]
        self._own.pause_new()
        futures.wait(waiting, _STUCK_S)

    def wait_for_older(self) -> bool:
        """Wait until the older requests of all clients have ended. Returns False if `resume_new()` came before that.

        The requests of a client whose process ends meanwhile count as ended.
        """
        waiting = [client.wait_for_older() for client in self._remotes()]
        is_done = self._own.wait_for_older()
        futures.wait(waiting)
        return all([is_done, *(future.exception() is not None or future.result() for future in waiting)])

    def complete_pause(self, replies: Mapping[int, RankReply], aborts: bool, timeout_s: float) -> bool:
        """Call `EngineClient.complete_pause` on all clients. A client whose process ends meanwhile doesn't count.

        Returns: whether all clients got all outputs within `timeout_s` seconds.
        """
        waiting = [
            client.complete_pause(_sent_to(client.client_index, replies), aborts, timeout_s)
            for client in self._remotes()
        ]
        deadline_s = time.monotonic() + timeout_s + _ANSWER_S
        is_done = self._own.complete_pause(_sent_to(0, replies), aborts, timeout_s)
        futures.wait(waiting, max(0.0, deadline_s - time.monotonic()))
        return is_done and all(
            future.done() and (future.exception() is not None or future.result()) for future in waiting
        )

    def resume_new(self) -> None:
        """Have all clients pause no more requests: see `EngineClient.resume_new`."""
        with self._lock:
            self._is_paused = False
            for client in self._remote:
                client.resume_new()
        self._own.resume_new()

    @property
    def num_waiting_for_rank(self) -> int:
        """Number of requests of all clients that wait because no rank serves, or because the engine is paused."""
        return self._own.num_waiting_for_rank + sum(client.num_waiting_for_rank for client in self._remotes())

    def counts(self) -> dict[int, RankCounts]:
        """Sums of all clients' counts for each rank, by dp_rank. Includes ranks and clients that are gone."""
        with self._lock:
            parts = [self._counts_of_gone, *(client.counts() for client in self._remote)]
        return total([self._own.counts(), *parts])

    def links(self) -> dict[int, LinkView]:
        """The ranks in service, by dp_rank, with their last known loads. Sends nothing to the ranks."""
        remote = self._remotes()
        return {
            dp_rank: LinkView(link.is_leaving, _combined([link.load, *(client.load(dp_rank) for client in remote)]))
            for dp_rank, link in self._own.links().items()
        }

    def _remotes(self) -> list[RemoteClient]:
        with self._lock:
            return list(self._remote)

    def _remove(self, dp_ranks: Sequence[int], come_back: bool) -> None:
        for dp_rank in dp_ranks:
            self._ranks.pop(dp_rank, None)
        self._away = self._away.union(dp_ranks) if come_back else self._away.difference(dp_ranks)


def _combined(loads: Sequence[LoadView]) -> LoadView:
    """The largest of the loads that several clients know of one rank.

    A client without requests on the rank gets no outputs with a new load, so the load that it knows may be too small.
    """
    return max(loads, key=lambda load: load.num_running + load.num_waiting, default=NO_LOAD)


def _sent_to(client_index: int, replies: Mapping[int, RankReply]) -> Sent:
    return {dp_rank: (reply.pid, reply.num_sent.get(client_index, 0)) for dp_rank, reply in replies.items()}


def _wait(waiting: Sequence[Future[Any]], deadline_s: float) -> list[Any]:
    """The futures' results. False for a client that failed or didn't answer before the deadline."""
    futures.wait(waiting, max(0.0, deadline_s - time.monotonic()))
    return [future.done() and future.exception() is None and future.result() for future in waiting]
