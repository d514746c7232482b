"""raycore's exceptions.

::

    RaycoreError
    ├── InvalidInput (ValueError)       an invalid value from the caller; the message names it
    │   ├── InvalidConfig                 an engine or server option
    │   │   └── MissingPackage (ImportError)  a package of an extra isn't installed; the message names the extra
    │   ├── InvalidRequest                a prompt or a sampling parameter
    │   │   ├── InvalidAdapter              a LoRA adapter: its options, tensors, files
    │   │   └── RequestTooLarge             the request can never fit, even on an idle engine
    │   └── InvalidCheckpoint             a checkpoint: architecture, tensors, files
    ├── InitializationError             the engine failed to start; the cause is chained
    ├── EngineDeadError                 the engine failed, was shut down or is draining; the message begins with why
    ├── RequestFailed                   one request failed; others are unaffected
    │   └── WeightVersionChanged          the weights changed while it ran, and it asked to fail then
    ├── ControlError                    an engine run by another process can't be reached, or refused a command
    ├── WorkerDied                      a worker process ended unexpectedly: rank, pid, node, cause
    ├── WorkerFailed                    a worker raised an exception: rank and traceback
    │   └── WorkerRefused (InvalidInput)  a worker was called with an invalid value; the message names it
    └── RpcTimeout (TimeoutError)       not every worker replied within the deadline
    PlacementShortage                   the cluster has no room for the ranks (from the placement package)

Messages say what was asked, what was found, and what to do. `InvalidInput` is also a ``ValueError``, so that code
written for other engines catches it unchanged.
"""

from __future__ import annotations

__all__ = [
    "ControlError",
    "EngineDeadError",
    "InitializationError",
    "InvalidAdapter",
    "InvalidCheckpoint",
    "InvalidConfig",
    "InvalidInput",
    "InvalidRequest",
    "MissingPackage",
    "PlacementShortage",
    "RaycoreError",
    "RequestFailed",
    "RequestTooLarge",
    "RpcTimeout",
    "WeightVersionChanged",
    "WorkerDied",
    "WorkerFailed",
    "WorkerRefused",
]

from collections.abc import Sequence
from typing import TYPE_CHECKING

from placement.errors import PlacementShortage as PlacementShortage

if TYPE_CHECKING:
    from raycore.outputs import RequestOutput


class RaycoreError(Exception):
    """Base class of raycore's exceptions."""


class InvalidInput(RaycoreError, ValueError):
    """An invalid value from the caller. The message names it."""


class InvalidConfig(InvalidInput):
    """An invalid engine or server option, or combination of options."""


class MissingPackage(InvalidConfig, ImportError):
    """What was asked needs a package that isn't installed. The message names the extra of raycore that brings it."""


class InvalidRequest(InvalidInput):
    """An invalid prompt or sampling parameter. Other requests are unaffected."""


class RequestTooLarge(InvalidRequest):
    """A request that exceeds the engine's limits and could never run, even on an idle engine."""


class InvalidAdapter(InvalidRequest):
    """A LoRA adapter that is missing, damaged, not made for the model, or of a kind that isn't supported."""


class InvalidCheckpoint(InvalidInput):
    """A checkpoint that is missing, damaged, or of an unsupported architecture or format."""


class InitializationError(RaycoreError):
    """The engine failed to start. The error of the first process that failed is the cause."""


class EngineDeadError(RaycoreError):
    """The engine serves no requests: it has failed, was shut down, or is draining. The message begins with the cause.

    `pid` and `node` (a Ray node id) identify the engine or worker process that died; both are None if none did.
    """

    def __init__(self, message: str, *, pid: int | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.node = node


class RequestFailed(RaycoreError):
    """One request failed; others are unaffected. The message ends with the reason.

    Either more than `max_request_replays` ranks failed while they had the request, or the request's
    `structured_outputs` turned out to be too complex to follow.

    If `LLM.generate` raises this, `outputs` has an entry for each of its prompts, which is None if that request failed.
    """

    outputs: Sequence[RequestOutput | None] = ()


class WeightVersionChanged(RequestFailed):
    """The weights have changed while a request with `on_version_change="fail"` ran."""


class ControlError(RaycoreError):
    """An engine that another process runs can't be found or reached, or it refused a command such as `scale`."""


class WorkerDied(RaycoreError):
    """A worker process ended unexpectedly."""

    def __init__(self, rank: int, pid: int | None, node: str | None, cause: str) -> None:
        super().__init__(rank, pid, node, cause)
        self.rank = rank
        self.pid = pid
        self.node = node
        self.cause = cause

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid}, node {self.node}) died: {self.cause}"


class WorkerFailed(RaycoreError):
    """A worker raised an exception. ``traceback`` is its traceback as text."""

    def __init__(self, rank: int, error: str, traceback: str) -> None:
        super().__init__(rank, error, traceback)
        self.rank = rank
        self.error = error
        self.traceback = traceback

    def __str__(self) -> str:
        return f"worker {self.rank} raised {self.error}\n{self.traceback}"


class WorkerRefused(WorkerFailed, InvalidInput):
    """A worker raised `InvalidInput`: the caller gave it an invalid value. The message is that error's."""

    def __str__(self) -> str:
        return self.error.partition(": ")[2]


class RpcTimeout(RaycoreError, TimeoutError):
    """Not every worker replied within the deadline. Late replies are discarded."""
