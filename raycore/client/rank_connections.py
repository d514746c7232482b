"""The connections from one client to the ranks of an engine: requests out, outputs in, calls. Knows no requests.

One thread for each rank receives its outputs and hands them to the client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from ray.exceptions import RayActorError, RayError, RayTaskError

from raycore.errors import EngineDeadError
from raycore.messages import NO_LOAD, EngineInfo, EngineRequest, LoadView, OutputBatch
from raycore.ray_api import cause_of, get, get_all, stream

if TYPE_CHECKING:
    from raycore.engine.engine_actor import DPEngineCoreActor

logger = logging.getLogger(__name__)

CAUSE_GRACE_S = 2.0
"""A rank's broken output stream waits this long for the supervisor to find the rank gone."""

_STREAM_POLL_INTERVAL_S = 0.01


@dataclass(eq=False, slots=True)
class RankConnection:
    """The connection to one rank, for as long as the rank serves."""

    dp_rank: int
    actor: DPEngineCoreActor
    info: EngineInfo
    load: LoadView = NO_LOAD
    """The rank's, as it last said."""
    delivering: threading.Lock = field(default_factory=threading.Lock)
    """Held while outputs of the rank are handed to callers. After `disconnect()` it tells when the last were."""


class RankConnections:
    """By dp_rank. The client serialises all calls with its lock, except for those that say otherwise."""

    def __init__(self, client_index: int, deliver: Callable[[RankConnection, OutputBatch], None]) -> None:
        """`deliver`: takes a rank's outputs, on that rank's thread, in order."""
        self.on_broken_stream: Callable[[int, str], object] = lambda dp_rank, reason: None
        """Told of a rank whose outputs can't be received although it hasn't been found lost, and why."""
        self._client_index = client_index
        self._deliver = deliver
        self._by_rank: dict[int, RankConnection] = {}
        self._is_closed = False

    def connect(self, dp_rank: int, actor: DPEngineCoreActor, info: EngineInfo) -> None:
        """The rank serves: receive its outputs from now on."""
        connection = self._by_rank[dp_rank] = RankConnection(dp_rank, actor, info)
        name = f"raycore-outputs-dp{dp_rank}"
        threading.Thread(target=self.receive, args=(connection,), name=name, daemon=True).start()

    def disconnect(self, dp_ranks: Sequence[int]) -> list[RankConnection]:
        """Take nothing more from these ranks. Returns the connections to those that there were."""
        found = [self._by_rank.pop(dp_rank, None) for dp_rank in dp_ranks]
        return [connection for connection in found if connection is not None]

    def close(self) -> None:
        """The engine is gone: take nothing from any rank, and tell them nothing."""
        self._is_closed = True

    def is_current(self, connection: RankConnection) -> bool:
        """Whether the rank's outputs are still wanted. Needs no lock."""
        return not self._is_closed and self._by_rank.get(connection.dp_rank) is connection

    def all(self) -> list[RankConnection]:
        """In the order of the ranks."""
        return [connection for _, connection in sorted(self._by_rank.items())]

    def submit(self, requests: Mapping[int, Sequence[EngineRequest]]) -> None:
        """Hand requests to ranks, one message a rank."""
        for dp_rank, sequences in requests.items():
            self._by_rank[dp_rank].actor.submit.remote(msgspec.msgpack.encode(sequences))

    def abort(self, seq_ids: Mapping[int, Sequence[int]]) -> None:
        """Have ranks drop sequences. Ranks that are gone have dropped them already."""
        for dp_rank, dropped in seq_ids.items():
            connection = self._by_rank.get(dp_rank)
            if dropped and connection is not None and not self._is_closed:
                connection.actor.abort.remote(list(dropped))

    def forget_client(self, client_index: int) -> None:
        """Have the ranks drop all that another client had there."""
        for connection in self._by_rank.values():
            connection.actor.forget_client.remote(client_index)

    # ---- without the client's lock

    def receive(self, connection: RankConnection) -> None:
        """Hand the rank's outputs on until there are no more."""
        decoder = msgspec.msgpack.Decoder(OutputBatch)
        try:
            for ref in stream(connection.actor.outputs, self._client_index):
                self._deliver(connection, decoder.decode(get(ref)))
        except RayError as error:
            self._on_stream_lost(connection, error)
        except Exception as error:
            # Nothing of this rank would be received any more. Whoever waits for it needs the rank replaced.
            logger.exception("the outputs of rank %d can't be taken in", connection.dp_rank)
            reason = f"its outputs can't be taken in: {type(error).__name__}: {error}"
            self.on_broken_stream(connection.dp_rank, reason)

    def _on_stream_lost(self, connection: RankConnection, error: RayError) -> None:
        """Usually the rank has died, and the supervisor knows or is about to."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self.is_current(connection):
            if time.monotonic() > deadline_s:
                self.on_broken_stream(connection.dp_rank, f"its output stream broke: {error}")
                return
            time.sleep(_STREAM_POLL_INTERVAL_S)


def call_utility(
    connections: Sequence[RankConnection], method: str, args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    """Call a utility on ranks, all at once. Returns the results in the order of `connections`.

    Raises: what any rank raised; EngineDeadError when one is lost before it answers.
    """
    refs = [connection.actor.utility.remote(method, args, {}, timeout_s) for connection in connections]
    try:
        return get_all(refs, timeout_s=timeout_s + 1.0)
    except RayTaskError as error:
        raise cause_of(error) from None
    except RayActorError as error:
        raise EngineDeadError(f"{error}\na rank was lost before it had answered {method}()") from error
