"""Calls an engine's utility methods by name, and converts the arguments to the types in the methods' signatures."""

from __future__ import annotations

import inspect
import typing
from concurrent.futures import Future
from typing import Any, cast

import msgspec

from raycore.engine.mailbox import Utility
from raycore.errors import InvalidInput
from raycore.plain_errors import decode_problem

PREFIX = "utility_"
"""Only methods whose names begin with this can be called. Callers omit it: `reset_prefix_cache` calls
`utility_reset_prefix_cache`."""


def call_utility(target: object, command: Utility) -> None:
    """Call the method of `target` that `command` names. Its result or exception becomes the command's reply.

    If the method returns a future, that is done later, the reply is the future's.
    """
    try:
        result = _call(target, command)
    except Exception as error:
        # the caller gets the exception: an error in a utility method must not end the engine
        command.reply.set_exception(error)
        return
    if isinstance(result, Future):
        cast("Future[Any]", result).add_done_callback(lambda done: _pass_on(done, command.reply))
    else:
        command.reply.set_result(result)


def _pass_on(done: Future[Any], reply: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        reply.set_result(done.result())
    else:
        reply.set_exception(error)


def _call(target: object, command: Utility) -> Any:
    method = getattr(target, PREFIX + command.method, None)
    if method is None:
        known = sorted(name.removeprefix(PREFIX) for name in dir(target) if name.startswith(PREFIX))
        raise InvalidInput(f"the engine has no method {command.method!r}; it has {', '.join(known)}")
    try:
        bound = inspect.signature(method).bind(*command.args, **command.kwargs)
    except TypeError as error:
        raise InvalidInput(f"{command.method}(): {error}") from None
    hints = typing.get_type_hints(method)
    for name, value in bound.arguments.items():
        bound.arguments[name] = _convert(command.method, name, value, hints.get(name, Any))
    return method(*bound.args, **bound.kwargs)


def _convert(method: str, name: str, value: Any, wanted: Any) -> Any:
    """Convert `value` to the type `wanted`, for example a list to a tuple or a mapping to a Struct."""
    if wanted is Any:
        return value
    try:
        return msgspec.convert(value, wanted, strict=False)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInput(f"{method}(): {name}={value!r}: {decode_problem(error)}") from None
