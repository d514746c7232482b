"""How bytes travel between an engine and its workers, as the rest of the executor sees it.

A `Transport` is the engine's end; an `Endpoint`, of `rpc/endpoint.py`, is one worker's. Requests go from the engine
to all workers at once, replies from each worker to the engine; both are plain `bytes`, in the order of their sending.
What the bytes mean is in `rpc/wire.py`; the implementations are in `channel.py` and `actor_call.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from raycore.rpc.endpoint import Invitation

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore import ray_api


class ServingActor(Protocol):
    """What a transport calls of a worker's actor. See `WorkerActor`."""

    @property
    def serve(self) -> ray_api.Endpoint[[], None]:
        """Handle requests from the channel until told to stop, or until it is closed."""
        ...

    @property
    def call(self) -> ray_api.Endpoint[[bytes], bytes | None]:
        """Handle one request that came without a channel."""
        ...

    @property
    def hold(self) -> ray_api.Endpoint[[], None]:
        """Return when the worker has stopped."""
        ...

    @property
    def close(self) -> ray_api.Endpoint[[], None]:
        """Have `serve()` or `hold()` return."""
        ...


class Transport(Protocol):
    """The engine's end. One thread at a time may send and receive; `close()` may come from any other."""

    def invite(self, rank: int) -> Invitation:
        """What worker `rank` needs to join."""
        ...

    def accept(self, rank: int, answer: Any) -> None:
        """Complete the connection to worker `rank`."""
        ...

    def finish_joining(self) -> None:
        """Release what only joining needs, now that all workers have been accepted."""
        ...

    def start(self) -> list[ObjectRef[None]]:
        """Have the workers serve. Returns, in rank order, the refs that complete when a worker stops serving."""
        ...

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send a request to every worker, waiting until all have taken the one before.

        Replies that arrive meanwhile are kept for `receive()`, so two full directions never block each other.

        Raises:
            TimeoutError: not before `deadline_s` (of `time.monotonic()`). The connection is then of no use any more.
            TransportClosed: it was closed.
        """
        ...

    def receive(self, deadline_s: float) -> tuple[int, bytes] | None:
        """The next reply and its sender's rank, or None if there is none by `deadline_s`. Raises `TransportClosed`."""
        ...

    def close(self) -> None:
        """Wake everybody on both sides, with `TransportClosed`. Idempotent."""
        ...


def split(message: bytes, capacity: int) -> list[bytes]:
    """The parts that `Joiner` puts together again: all full but the last, which is shorter and may be empty.

    A message that fits is its own only part.
    """
    if len(message) < capacity:
        return [message]
    return [message[start : start + capacity] for start in range(0, len(message) + 1, capacity)]


class Joiner:
    """Puts one sender's parts together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> bytes | None:
        """The whole message if `part` ends it."""
        if len(part) == self._capacity:
            self._parts.append(part)
            return None
        if not self._parts:
            return part
        message = b"".join([*self._parts, part])
        self._parts = []
        return message
