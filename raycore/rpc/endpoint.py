"""A worker's end of the line to its engine, as the worker sees it. The implementations are the executor's."""

from __future__ import annotations

from typing import Any, Protocol


class TransportClosed(Exception):  # an event rather than an error: every transport ends so
    """The other side is gone, or this side was closed. Whoever closed it knows why."""


class Endpoint(Protocol):
    """A worker's end."""

    def finish_joining(self) -> None:
        """Release what only joining needs, now that all workers have joined."""
        ...

    def receive(self) -> bytes:
        """Wait for the next request. Raises `TransportClosed`, which is the only other end of the wait."""
        ...

    def send(self, message: bytes) -> None:
        """Send a reply, waiting until the engine has taken the one before. Raises `TransportClosed`."""
        ...

    def close(self) -> None:
        """Wake whoever waits, with `TransportClosed`. From any thread; idempotent."""
        ...


class Invitation(Protocol):
    """What an engine hands a worker, so that it can join. Can be pickled."""

    def join(self) -> tuple[Endpoint | None, Any]:
        """In the worker's process: its endpoint, and the answer that the engine's `Transport.accept()` takes.

        No endpoint: the worker is called instead (see `WorkerActor.call`).
        """
        ...
