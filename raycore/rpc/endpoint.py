"""The interfaces of a worker's end of a transport. They are implemented in `rpc/channel.py` and `rpc/actor_call.py`."""

from __future__ import annotations

from typing import Any, Protocol


class TransportClosed(Exception):  # no Error suffix: this is how every transport ends
    """The other side is gone, or this side was closed. It does not carry the reason, which the closing side knows."""


class Endpoint(Protocol):
    """A worker's end of a transport."""

    def finish_joining(self) -> None:
        """Release resources that only joining needs. Called after all workers have joined."""
        ...

    def receive(self) -> bytes:
        """Wait for the next request, without a timeout. Raises `TransportClosed`."""
        ...

    def send(self, message: bytes) -> None:
        """Send a reply. Waits until the engine has taken the previous one. Raises `TransportClosed`."""
        ...

    def close(self) -> None:
        """Make waiting and later calls raise `TransportClosed`. Idempotent. May be called from any thread."""
        ...


class Invitation(Protocol):
    """What a worker needs to join its engine's transport. Can be pickled."""

    def join(self) -> tuple[Endpoint | None, Any]:
        """Join, in the worker's process. Returns the endpoint and the answer for the engine's `Transport.accept()`.

        The endpoint is None if the transport calls the worker's actor instead (see `WorkerActor.call`).
        """
        ...
