"""The interface of a transport, which carries bytes between an engine and its workers.

A `Transport` is the engine's end, and a `WorkerEndpoint` (`rpc/endpoint.py`) is one worker's end. A request goes to all
workers; a reply goes from one worker to the engine. Requests and replies are plain `bytes`, and arrive in the order in
which their sender sent them. Their format is in `rpc/wire.py`. The implementations are in `rpc/channel.py` and
`rpc/actor_call.py`.
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
    def serve(self) -> ray_api.ActorMethod[[], None]:
        """Handle requests from the channel, until the engine asks the worker to stop or the channel is closed."""
        ...

    @property
    def call(self) -> ray_api.ActorMethod[[bytes], bytes | None]:
        """Handle one request, and return its reply or None. Used by the transport that has no channels."""
        ...

    @property
    def wait_until_stopped(self) -> ray_api.ActorMethod[[], None]:
        """Block until the worker has stopped."""
        ...

    @property
    def close(self) -> ray_api.ActorMethod[[], None]:
        """Make `serve()` or `wait_until_stopped()` return."""
        ...


class Transport(Protocol):
    """The engine's end of a transport. Only one thread at a time may send or receive; any thread may call `close()`."""

    def invite(self, rank: int) -> Invitation:
        """Return the invitation that worker `rank` needs to join."""
        ...

    def accept(self, rank: int, answer: Any) -> None:
        """Complete the connection to worker `rank`. `answer` is what that worker's `Invitation.join()` returned."""
        ...

    def finish_joining(self) -> None:
        """Release resources that are only needed for joining. Called after `accept()` was called for all workers."""
        ...

    def start(self) -> list[ObjectRef[None]]:
        """Make the workers handle requests.

        Returns a Ray ref for each worker, in rank order, that completes when the worker stops handling requests.
        """
        ...

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send a request to every worker, to those of the first stage of a pipeline first.

        May wait until the workers of a stage have taken the previous request.

        Replies that arrive meanwhile are kept for `receive()`, so that an engine and a worker that both wait to send
        cannot deadlock.

        Raises:
            TimeoutError: the request was not sent by `deadline_s`, a time of `time.monotonic()`. The transport is
                unusable afterwards.
            TransportClosed: the transport was closed, or a worker is gone.
        """
        ...

    def receive(self, deadline_s: float) -> tuple[int, bytes] | None:
        """Wait for the next reply. Returns the rank of the worker that sent it, and the reply.

        Returns None if no reply arrives by `deadline_s`, a time of `time.monotonic()`. Raises `TransportClosed`.
        """
        ...

    def close(self) -> None:
        """Make waiting and later calls, of the engine and of workers, raise `TransportClosed`. Idempotent."""
        ...


def split(message: bytes, capacity: int) -> list[bytes]:
    """Split a message into parts of `capacity` bytes. Only the last part is shorter, possibly empty, to mark the
    message's end.

    A message shorter than `capacity` is one part. `Joiner` is the inverse.
    """
    if len(message) < capacity:
        return [message]
    return [message[start : start + capacity] for start in range(0, len(message) + 1, capacity)]


class Joiner:
    """Joins the parts into which `split` has divided the messages of one sender."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> bytes | None:
        """Add a part. Returns the whole message if `part` is its last part, otherwise None."""
        if len(part) == self._capacity:
            self._parts.append(part)
            return None
        if not self._parts:
            return part
        message = b"".join([*self._parts, part])
        self._parts = []
        return message
