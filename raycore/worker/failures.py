"""What a worker does when it fails: it tells the workers that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class HasPeers(Protocol):
    """A worker that others wait for."""

    def tell_peers(self, error: BaseException) -> None:
        """Tell them that it has failed."""


P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=HasPeers)


def fails_together(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Decorate a method in which workers wait for each other. If one raises in it, the others stop waiting."""

    @wraps(method)
    def run(worker: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(worker, *args, **kwargs)
        except BaseException as error:
            worker.tell_peers(error)
            raise

    return run
