"""The connections from one client to the ranks of an engine: they carry requests, outputs and calls.

A `Receiver` passes the ranks' outputs to the client. `RequestTable` keeps track of requests.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from ray.exceptions import GetTimeoutError, RayError

from raycore.client.receiver import Receiver
from raycore.errors import EngineDeadError, RpcTimeout
from raycore.messages import NO_LOAD, EngineInfo, EngineRequest, LoadView, OutputBatch
from raycore.ray_api import Stream, cause_of, get_all, has_ended
from raycore.system import threading

if TYPE_CHECKING:
    from raycore.engine.engine_actor import DPEngineCoreActor

logger = logging.getLogger(__name__)

Sent = Mapping[int, tuple[int, int]]
"""By dp_rank: the process id of the rank's engine, and the number of batches with outputs that it has sent to a client.

The process id tells a rank from the one that replaces it."""


class ReachableRank(Protocol):
    """A rank whose actor is known."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def actor(self) -> DPEngineCoreActor: ...


@dataclass(eq=False, slots=True)
class RankConnection:
    """The connection to one rank while it serves."""

    dp_rank: int
    actor: DPEngineCoreActor
    info: EngineInfo
    number: int = 0
    """Counts this client's connections, those to all ranks together."""
    load: LoadView = NO_LOAD
    """The rank's load, as last reported."""
    num_batches: int = 0
    """Number of batches with outputs that have been delivered. The rank counts them, too: see `Mailbox.flush`."""
    has_left: bool = False
    """Whether this client has left the rank."""
    delivering: threading.Lock = field(default_factory=threading.Lock)
    """Held while the rank's outputs are delivered. Acquire it after `disconnect()` to wait for the last delivery."""


class RankConnections:
    """A client's connections to ranks. The client holds its lock while it calls a method, unless the method says
    otherwise."""

    def __init__(self, client_index: int, deliver: Callable[[RankConnection, OutputBatch], None]) -> None:
        """`deliver`: receives each rank's outputs in order, on the one thread that receives all ranks' outputs."""
        self.on_broken_stream: Callable[[int, str], object] = lambda dp_rank, reason: None
        """Called with a dp_rank and a reason if a rank's output stream breaks but the supervisor doesn't report that
        the rank was lost, or if the rank can't be sent requests."""
        self._client_index = client_index
        self._by_rank: dict[int, RankConnection] = {}
        self._tightest: EngineInfo | None = None
        """Of the ranks that are connected, that with the smallest cache. None: there is no rank."""
        self._decoder = msgspec.msgpack.Decoder(OutputBatch)
        self._receiver = Receiver(
            lambda connection: Stream(connection.actor.outputs, client_index, connection.number),
            lambda connection, batch: deliver(connection, self._decoder.decode(batch)),
            self.is_current,
            lambda connection, reason: self.on_broken_stream(connection.dp_rank, reason),
            RayError,
        )
        self._numbers = itertools.count(1)
        self._is_closed = False

    def connect(self, dp_rank: int, actor: DPEngineCoreActor, info: EngineInfo) -> EngineInfo:
        """Connect to a rank, and start to receive its outputs.

        Returns: the `EngineInfo` of the connected rank with the smallest cache, by which requests are checked.
        """
        self.disconnect([dp_rank])
        connection = self._by_rank[dp_rank] = RankConnection(dp_rank, actor, info, next(self._numbers))
        self._receiver.add(connection)
        if self._tightest is None or info.num_kv_tokens < self._tightest.num_kv_tokens:
            self._tightest = info
        return self._tightest

    def disconnect(self, dp_ranks: Sequence[int]) -> list[RankConnection]:
        """Stop receiving from these ranks. Returns the connections of those ranks that were connected."""
        popped = [self._by_rank.pop(dp_rank, None) for dp_rank in dp_ranks]
        found = [connection for connection in popped if connection is not None]
        if any(connection.info is self._tightest for connection in found):
            infos = (connection.info for connection in self._by_rank.values())
            self._tightest = min(infos, key=lambda info: info.num_kv_tokens, default=None)
        return found

    def close(self) -> None:
        """Stop receiving from all ranks, and send them nothing more, because the engine has ended."""
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        """Whether the engine has ended."""
        return self._is_closed

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until all output streams have ended. Returns whether they have.

        May be called without the lock.
        """
        return self._receiver.join(timeout_s)

    def is_current(self, connection: RankConnection) -> bool:
        """Whether the connection is still in use. May be called without the lock."""
        return not self._is_closed and self._by_rank.get(connection.dp_rank) is connection

    def all(self) -> list[RankConnection]:
        """All connections, in rank order."""
        return [connection for _, connection in sorted(self._by_rank.items())]

    def has_received(self, sent: dict[int, tuple[int, int]]) -> bool:
        """Whether all batches that the ranks have sent were delivered. Ignores ranks that are gone.

        `sent`: as `Sent`. Removes the ranks whose batches were, because this is asked again after each delivery.
        """
        while sent:
            dp_rank, (pid, count) = next(iter(sent.items()))
            connection = self._by_rank.get(dp_rank)
            if connection is not None and connection.info.pid == pid and connection.num_batches < count:
                return False
            del sent[dp_rank]
        return True

    def submit(self, requests: Mapping[int, Sequence[EngineRequest]]) -> None:
        """Send requests to ranks, one message per rank."""
        if self._is_closed:
            return
        for dp_rank, sequences in requests.items():
            self._by_rank[dp_rank].actor.submit.remote(msgspec.msgpack.encode(sequences))

    def resubmit(self, requests: Mapping[int, Sequence[EngineRequest]]) -> None:
        """Send requests whose callers were told that they run. A rank that can't be sent them is reported as broken, so
        that they move on."""
        for dp_rank, sequences in requests.items():
            try:
                self.submit({dp_rank: sequences})
            except Exception as error:  # Ray's store may be full of images, for example
                logger.exception("can't send requests to dp_rank %d", dp_rank)
                self.on_broken_stream(dp_rank, f"it can't be sent requests: {type(error).__name__}: {error}")

    def abort(self, seq_ids: Mapping[int, Sequence[int]]) -> None:
        """Abort sequences on their ranks. Ignores ranks that are gone."""
        for dp_rank, dropped in seq_ids.items():
            connection = self._by_rank.get(dp_rank)
            if dropped and connection is not None and not self._is_closed:
                connection.actor.abort.remote(list(dropped))

    def forget_client(self, client_index: int) -> None:
        """Have the ranks abort all requests of another client."""
        for connection in self._by_rank.values():
            connection.actor.forget_client.remote(client_index)

    def leave(self, connection: RankConnection) -> None:
        """Have a rank, from which this client has disconnected, abort the client's requests and end its stream.

        Otherwise, the rank would go on with the requests until it is stopped, and if it serves again, the old stream
        would take outputs from the new one.
        """
        connection.has_left = True
        connection.actor.forget_client.remote(self._client_index, False, connection.number)


def call_utility(ranks: Sequence[ReachableRank], method: str, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    """Call a utility, which `Utilities` lists, on several ranks in parallel.

    Returns: the results, in the order of `ranks`.

    Raises: what any rank raised; EngineDeadError if a rank is lost before it answers; RpcTimeout if it doesn't answer.
    """
    refs = [rank.actor.utility.remote(method, args, {}, timeout_s) for rank in ranks]
    try:
        return get_all(refs, timeout_s=timeout_s + 1.0)
    except GetTimeoutError as error:
        raise RpcTimeout(f"a rank hasn't answered {method}() within {timeout_s + 1.0:g} s") from error
    except RayError as error:
        if not has_ended(error):
            raise cause_of(error) from None
        text = f"a rank was lost before it answered {method}(); other ranks may have executed it"
        raise EngineDeadError(f"{error}\n{text}") from error
