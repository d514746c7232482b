"""Calls of a worker's methods by name, and what becomes of the exceptions that they raise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from raycore.errors import InvalidInput, WorkerFailed, WorkerRefused


def call_method(worker: object, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a worker's method, for `collective_rpc`.

    Raises: what the method raises; InvalidInput if there is no such method, or it doesn't take the arguments.
    """
    method = getattr(worker, name, None)
    if not callable(method):
        raise InvalidInput(f"method={name!r}: workers have no such method")
    try:
        return method(*args, **kwargs)
    except TypeError as error:
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as mismatch:
            raise InvalidInput(f"method={name!r} doesn't take these arguments: {mismatch}") from error
        raise


def worker_error(rank: int, error: str, traceback: str, is_refusal: bool) -> WorkerFailed:
    """The error for an exception of a worker. `is_refusal`: whether it is an `InvalidInput`."""
    return (WorkerRefused if is_refusal else WorkerFailed)(rank, error, traceback)


def told_by_worker(error: Exception, traceback: str) -> tuple[str, str, bool]:
    """What a worker tells of its exception: the arguments of `worker_error`, without the rank."""
    return f"{type(error).__name__}: {error}", traceback, isinstance(error, InvalidInput)
