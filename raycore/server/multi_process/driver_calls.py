"""Calls that an API server's process makes on the driver's engine, adapters and stored responses.

The process can't call the driver, because the driver isn't an actor. So the calls travel in the process's reports, and
the driver sends the results by calls of the process's actor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from raycore.control.calls import CALL_NAMES, AsyncCalls
from raycore.errors import EngineDeadError, InvalidInput, RaycoreError
from raycore.parts.adapters.server.adapters import ADAPTER_CALLS, LoadsAdapters
from raycore.server.dialects.responses.store import STORE_CALLS, ResponseStore
from raycore.server.http.errors import NotAllowed, NotFound
from raycore.system import Future, asyncio, threading

ENGINE_CALLS = CALL_NAMES | {"abort_requests"}
"""The names of the engine's methods that processes call."""

READ_METRICS = "read_metrics"
"""The call for the engine's `MetricsView` and the sum of the HTTP counts of all API servers."""


class DriverCall(msgspec.Struct, frozen=True, array_like=True):
    """A call on the driver's engine, adapters or stored responses."""

    number: int
    method: str
    """One of `ENGINE_CALLS`, `ADAPTER_CALLS` or `STORE_CALLS`, or `READ_METRICS`."""
    arguments: dict[str, Any]


class DriverCalls:
    """The process's side. Thread-safe."""

    def __init__(self, on_call: Callable[[], object]) -> None:
        """`on_call`: called when there is a call to send."""
        self._on_call = on_call
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._unsent: list[DriverCall] = []
        self._waiting: dict[int, Future[Any]] = {}

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the driver's engine, adapters or store. Returns its result, or raises its error."""
        return await asyncio.shield(asyncio.wrap_future(self._begin(method, arguments)))

    def call_and_wait(self, method: str, timeout_s: float) -> Any:
        """The same for a thread without an event loop. Raises TimeoutError if the driver doesn't answer in time."""
        return self._begin(method, {}).result(timeout_s)

    def _begin(self, method: str, arguments: dict[str, Any]) -> Future[Any]:
        done: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = done
            self._unsent.append(DriverCall(number, method, arguments))
        self._on_call()
        return done

    def take(self) -> list[DriverCall]:
        """Remove and return the calls that haven't been sent yet."""
        with self._lock:
            unsent, self._unsent = self._unsent, []
        return unsent

    def has_unsent(self) -> bool:
        """Whether `take()` would return any calls."""
        return bool(self._unsent)

    def finish(self, number: int, result: Any, error: RaycoreError | None) -> None:
        """Complete the call with this number."""
        with self._lock:
            done = self._waiting.pop(number)
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)


def run_call(
    engine: AsyncCalls, adapters: LoadsAdapters, store: ResponseStore, call: DriverCall
) -> tuple[Any, RaycoreError | None]:
    """Make a call on what the driver has. Blocks. Returns the result and None, or None and the error."""
    targets = {ENGINE_CALLS: engine, ADAPTER_CALLS: adapters, STORE_CALLS: store}
    (target,) = (each for names, each in targets.items() if call.method in names)
    try:
        return asyncio.run(getattr(target, call.method)(**call.arguments)), None
    except Exception as error:  # the caller, in the other process, gets any error
        return None, _portable(error)


def _portable(error: Exception) -> RaycoreError:
    """An error that can be pickled, and for which the server gives the same response as for `error`."""
    kinds = (NotAllowed, NotFound, InvalidInput, EngineDeadError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RaycoreError)
    return kind(str(error) if isinstance(error, RaycoreError) else f"{type(error).__name__}: {error}")
