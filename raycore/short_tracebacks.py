"""Tracebacks that end in the code of the caller: the inner frames say nothing of a mistake of theirs."""

from __future__ import annotations

__all__ = ["ends_traceback", "ends_tracebacks"]

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from raycore.errors import InvalidInput, PlacementShortage, RaycoreError

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def ends_traceback(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator for public functions, coroutine functions and generators. The traceback of their errors has one frame
    of raycore's.

    Errors of the caller's values lose their causes, too, whose texts the messages have. With raycore's log level at
    debug, tracebacks are whole.
    """
    called: Any = function
    if inspect.iscoroutinefunction(function):

        async def call_async(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            try:
                return await called(*args, **kwargs)
            except (RaycoreError, PlacementShortage) as error:
                raise _ended(error)  # noqa: B904  # `_ended` says which causes stay

        return cast("Callable[_P, _R]", functools.wraps(function)(call_async))

    if inspect.isgeneratorfunction(function):

        def iterate(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            try:
                yield from called(*args, **kwargs)
            except (RaycoreError, PlacementShortage) as error:
                raise _ended(error)  # noqa: B904

        return cast("Callable[_P, _R]", functools.wraps(function)(iterate))

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (RaycoreError, PlacementShortage) as error:
            raise _ended(error)  # noqa: B904

    return call


def ends_tracebacks(kind: type[_R]) -> type[_R]:
    """Decorator for classes: `ends_traceback` for each public method that the class defines."""
    for name, each in list(vars(kind).items()):
        if inspect.isfunction(each) and not name.startswith("_"):
            setattr(kind, name, ends_traceback(each))
    return kind


def _ended(error: Exception) -> Exception:
    if logger.isEnabledFor(logging.DEBUG):
        return error
    if isinstance(error, InvalidInput | PlacementShortage):
        error.__cause__, error.__suppress_context__ = None, True
    return error.with_traceback(None)
