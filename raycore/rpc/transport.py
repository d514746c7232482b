"""The interface of a transport, which carries bytes between an engine and its workers.

A `Transport` is the engine's end, and an `Endpoint` (`rpc/endpoint.py`) is one worker's end. A request goes to all
workers, a reply goes from one worker to the engine. Both are plain `bytes` and arrive in the order in which they were
sent. Their format is in `rpc/wire.py`. The implementations are in `rpc/channel.py` and `rpc/actor_call.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from raycore.rpc.endpoint import Invitation

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore import ray_api


class ServingActor(Protocol):
    """The methods of a worker's actor that a transport calls. See `WorkerActor`."""

    @property
    def serve(self) -> ray_api.Endpoint[[], None]:
        """Handle requests from the channel until told to stop, or until it is closed."""
        ...

    @property
    def call(self) -> ray_api.Endpoint[[bytes], bytes | None]:
        """Handle one request and return its reply, for a transport without channels."""
        ...

    @property
    def hold(self) -> ray_api.Endpoint[[], None]:
        """Return when the worker has stopped."""
        ...

    @property
    def close(self) -> ray_api.Endpoint[[], None]:
        """Make `serve()` or `hold()` return."""
        ...


class Transport(Protocol):
    """The engine's end. Only one thread at a time may send or receive. `close()` may be called from any thread."""

    def invite(self, rank: int) -> Invitation:
        """What worker `rank` needs to join."""
        ...

    def accept(self, rank: int, answer: Any) -> None:
        """Complete the connection to worker `rank`."""
        ...

    def finish_joining(self) -> None:
        """Release resources that only joining needs. Called after all workers have been accepted."""
        ...

    def start(self) -> list[ObjectRef[None]]:
        """Make the workers serve. Returns, in rank order, a ref for each that completes when it stops serving."""
        ...

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send a request to every worker. May wait until all workers have taken the previous one.

        Replies that arrive meanwhile are kept for `receive()`, so that an engine and a worker that both wait to send
        cannot deadlock.

        Raises:
            TimeoutError: the request was not sent by `deadline_s`, a time of `time.monotonic()`. The transport is
                unusable afterwards.
            TransportClosed: the transport was closed, or a worker is gone.
        """
        ...

    def receive(self, deadline_s: float) -> tuple[int, bytes] | None:
        """The sender's rank and its reply, or None if none arrives by `deadline_s`. Raises `TransportClosed`."""
        ...

    def close(self) -> None:
        """Make waiting and later calls on both sides raise `TransportClosed`. Idempotent."""
        ...


def split(message: bytes, capacity: int) -> list[bytes]:
    """Split a message into parts of `capacity` bytes. The last part is shorter, possibly empty, which marks the end.

    A message shorter than `capacity` is one part. `Joiner` is the inverse.
    """
    if len(message) < capacity:
        return [message]
    return [message[start : start + capacity] for start in range(0, len(message) + 1, capacity)]


class Joiner:
    """Joins the parts of one sender's messages."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> bytes | None:
        """Add a part. Returns the whole message if `part` is its last."""
        if len(part) == self._capacity:
            self._parts.append(part)
            return None
        if not self._parts:
            return part
        message = b"".join([*self._parts, part])
        self._parts = []
        return message
