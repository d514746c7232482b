"""The interfaces of a worker's end of a transport. `rpc/channel.py` and `rpc/actor_call.py` implement them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class TransportClosed(Exception):  # no Error suffix: every transport ends this way
    """The other end of the transport is gone or has closed it, or this end was closed. The reason is not included."""


class WorkerEndpoint(Protocol):
    """A worker's end of a transport, which carries messages between the worker and its engine."""

    def finish_joining(self) -> None:
        """Release resources that are only needed for joining. Called after all workers have joined."""
        ...

    def receive(self, is_due: Callable[[], bool] | None = None) -> bytes | None:
        """Wait for the next request, without a timeout, and return it. Raises `TransportClosed`.

        Args:
            is_due: called repeatedly. Once it returns True, stop waiting, and return None.
        """
        ...

    def send(self, message: bytes) -> None:
        """Send a reply. Waits until the engine has taken the previous reply. Raises `TransportClosed`."""
        ...

    def close(self) -> None:
        """Make waiting and later calls raise `TransportClosed`. Idempotent. May be called from any thread."""
        ...


class Invitation(Protocol):
    """What an engine sends to a worker so that the worker can join the engine's transport. Can be pickled."""

    def join(self) -> tuple[WorkerEndpoint | None, Any]:
        """Join the transport. Called in the worker's process. Returns the endpoint, and the answer for
        `Transport.accept()`.

        The endpoint is None if the transport calls the worker's actor instead (see `WorkerActor.call`).
        """
        ...
