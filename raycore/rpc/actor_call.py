"""The transport over plain Ray actor calls: a request is one call to each worker, a reply is that call's result.

Much slower than channels, but it works wherever Ray does. `RayExecutor` falls back to it if it cannot create channels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from raycore.rpc.endpoint import TransportClosed

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.rpc.transport import ServingActor


class CallInvitation(NamedTuple):
    """See `endpoint.Invitation`. There is nothing to join: the engine calls the worker's actor."""

    def join(self) -> tuple[None, None]:
        """See `endpoint.Invitation`."""
        return None, None


class ActorCallTransport:
    """See `transport.Transport`."""

    def __init__(self, workers: Sequence[ServingActor]) -> None:
        self._workers = workers
        self._in_flight: dict[Future[bytes | None], int] = {}
        self._closing: Future[bytes | None] = Future()

    def invite(self, rank: int) -> CallInvitation:
        return CallInvitation()

    def accept(self, rank: int, answer: Any) -> None:
        """See `transport.Transport`. There is nothing to complete."""

    def finish_joining(self) -> None:
        """See `transport.Transport`. There is nothing to release."""

    def start(self) -> list[ObjectRef[None]]:
        return [worker.hold.remote() for worker in self._workers]

    def send(self, message: bytes, deadline_s: float) -> None:
        if self._closing.done():
            raise TransportClosed
        for rank, worker in enumerate(self._workers):
            self._in_flight[worker.call.remote(message).future()] = rank

    def receive(self, deadline_s: float) -> tuple[int, bytes] | None:
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            done, _ = wait([self._closing, *self._in_flight], left_s, FIRST_COMPLETED)
            if self._closing.done():
                raise TransportClosed
            if not done:
                return None
            reply = self._take(min(done, key=list(self._in_flight).index))  # the oldest call first
            if reply is not None:
                return reply

    def close(self) -> None:
        if self._closing.done():
            return
        self._closing.set_result(None)
        for worker in self._workers:
            worker.close.remote()

    def _take(self, call: Future[bytes | None]) -> tuple[int, bytes] | None:
        rank = self._in_flight.pop(call)
        error = call.exception()
        if error is not None:
            raise TransportClosed from error
        reply = call.result()
        return None if reply is None else (rank, reply)
