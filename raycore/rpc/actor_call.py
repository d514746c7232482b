"""A transport over plain Ray actor calls: a request is a call to each worker, and the call's result is the reply.

It is much slower than channels (`rpc/channel.py`), but works wherever Ray does. `RayExecutor` uses it if
`executor_transport` selects it, or if channels cannot be created.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raycore.rpc.endpoint import TransportClosed
from raycore.system import Future, InvalidStateError, futures, time

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.rpc.transport import ServingActor


class CallInvitation(NamedTuple):
    """The `Invitation` to an `ActorCallTransport`. A worker has nothing to join, because the engine calls its actor."""

    def join(self) -> tuple[None, None]:
        """Return neither an endpoint nor an answer."""
        return None, None


class ActorCallTransport:
    """Implements `Transport` with Ray actor calls."""

    def __init__(self, workers: Sequence[ServingActor]) -> None:
        self._workers = workers
        self._in_flight: list[deque[Future[bytes | None]]] = [deque() for _ in workers]
        """The calls whose results have not been taken, of each worker: the oldest first."""
        self._closing: Future[bytes | None] = Future()

    def invite(self, rank: int) -> CallInvitation:
        return CallInvitation()

    def accept(self, rank: int, answer: Any) -> None:
        """Do nothing: there is no connection to complete."""

    def finish_joining(self) -> None:
        """Do nothing: joining uses no resources."""

    def start(self) -> list[ObjectRef[None]]:
        return [worker.wait_until_stopped.remote() for worker in self._workers]

    def send(self, message: bytes, deadline_s: float) -> None:
        if self._closing.done():
            raise TransportClosed
        for worker, calls in zip(self._workers, self._in_flight, strict=True):
            calls.append(worker.call.remote(message).future())

    def receive(self, deadline_s: float) -> tuple[int, bytes] | None:
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            # only the oldest call of each worker, because results may arrive in another order than the calls were made
            oldest = {calls[0]: rank for rank, calls in enumerate(self._in_flight) if calls}
            done, _ = futures.wait([self._closing, *oldest], left_s, futures.FIRST_COMPLETED)
            if self._closing.done():
                raise TransportClosed
            if not done:
                return None
            # of the worker with the most calls: if the engine is slower than the workers, those of others would pile up
            rank = max((oldest[call] for call in done), key=lambda each: (len(self._in_flight[each]), -each))
            reply = self._take(rank)
            if reply is not None:
                return rank, reply

    def close(self) -> None:
        try:
            self._closing.set_result(None)
        except InvalidStateError:  # another thread has closed it, perhaps just now
            return
        for worker in self._workers:
            worker.close.remote()

    def _take(self, rank: int) -> bytes | None:
        call = self._in_flight[rank].popleft()
        error = call.exception()
        if error is not None:
            raise TransportClosed from error
        return call.result()
