"""Every error that raycore raises on purpose.

::

    RaycoreError
    ├── InvalidInput (ValueError)       a value that the caller can change; the message names it
    │   ├── InvalidConfig                 of the engine: sizes, parallel shape, names
    │   ├── InvalidRequest                of one request: prompt, sampling parameters
    │   │   └── RequestTooLarge             it can never fit, whatever else runs
    │   └── InvalidCheckpoint             of the model: architecture, tensors, files
    ├── InitializationError             the engine didn't come up; the cause is chained
    ├── EngineDeadError                 the engine is gone; the root cause comes first
    ├── RequestFailed                   one request can't be finished; the others go on
    ├── ControlError                    an engine that another process runs can't be reached, or refused
    ├── WorkerDied                      a worker process ended: rank, pid, node, cause
    ├── WorkerFailed                    a worker raised: rank and its own traceback
    └── RpcTimeout (TimeoutError)       not every worker replied within the deadline
    PlacementShortage                   the cluster can't hold the shape (from the placement package)

Messages say what was asked, what was found, and what to do about it. Bad input derives from
``ValueError`` too, so that code written for other engines catches it as it is.
"""

from __future__ import annotations

__all__ = [
    "ControlError",
    "EngineDeadError",
    "InitializationError",
    "InvalidCheckpoint",
    "InvalidConfig",
    "InvalidInput",
    "InvalidRequest",
    "PlacementShortage",
    "RaycoreError",
    "RequestFailed",
    "RequestTooLarge",
    "RpcTimeout",
    "WorkerDied",
    "WorkerFailed",
]

from collections.abc import Sequence
from typing import TYPE_CHECKING

from placement.errors import PlacementShortage as PlacementShortage

if TYPE_CHECKING:
    from raycore.outputs import RequestOutput


class RaycoreError(Exception):
    """The base of every error below."""


class InvalidInput(RaycoreError, ValueError):
    """A value that the caller can change; the message names it."""


class InvalidConfig(InvalidInput):
    """An engine option, or a combination of them, that can't work."""


class InvalidRequest(InvalidInput):
    """A prompt or a sampling parameter that can't work. Other requests are unaffected."""


class RequestTooLarge(InvalidRequest):
    """A request that could never run with this engine's limits, however idle it is."""


class InvalidCheckpoint(InvalidInput):
    """A checkpoint that is missing, damaged, or of a kind that raycore doesn't run."""


class InitializationError(RaycoreError):
    """The engine didn't come up. The first failing worker's own error is the cause."""


class EngineDeadError(RaycoreError):
    """The engine is gone, and with it the request. The message begins with the root cause.

    `pid` and `node` are of the process that died, where one did: the engine's or a worker's.
    """

    def __init__(self, message: str, *, pid: int | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.node = node


class RequestFailed(RaycoreError):
    """A request can't be finished; others are unaffected. The message ends with the reason.

    It was on a failing rank more than `max_request_replays` times, or its `structured_outputs` turned out to be too
    complex to follow.

    From `LLM.generate`, `outputs` has what the call's other requests gave, None in the place of those that failed.
    """

    outputs: Sequence[RequestOutput | None] = ()


class ControlError(RaycoreError):
    """An engine that another process runs can't be found or reached, or refused what it was asked for."""


class WorkerDied(RaycoreError):
    """A worker process ended without being asked to."""

    def __init__(self, rank: int, pid: int | None, node: str | None, cause: str) -> None:
        super().__init__(rank, pid, node, cause)
        self.rank = rank
        self.pid = pid
        self.node = node
        self.cause = cause

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid}, node {self.node}) died: {self.cause}"


class WorkerFailed(RaycoreError):
    """A worker raised. ``traceback`` is the worker's own, as text."""

    def __init__(self, rank: int, error: str, traceback: str) -> None:
        super().__init__(rank, error, traceback)
        self.rank = rank
        self.error = error
        self.traceback = traceback

    def __str__(self) -> str:
        return f"worker {self.rank} raised {self.error}\n{self.traceback}"


class RpcTimeout(RaycoreError, TimeoutError):
    """Not every worker replied within the deadline. Late replies are discarded."""
