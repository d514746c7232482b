"""Runs blocking calls for asyncio, and asyncio for blocking calls, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from raycore.system import Future, InvalidStateError, asyncio, futures, threading

P = ParamSpec("P")
T = TypeVar("T")

_END_S = 10.0


async def on_own_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a blocking call without blocking the event loop.

    `asyncio.to_thread` has only a few threads, which calls that wait for minutes would occupy, and Python's exit waits
    for them. If the caller is cancelled, the call goes on, and its result is dropped.
    """
    return await asyncio.wrap_future(_started(call, *args, **kwargs))


def run_apart(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, as `asyncio.run` does, also on a thread whose event loop runs.

    If an exception interrupts the wait, as Ctrl-C does, the coroutine is cancelled, and has 10 s to end.
    """
    began: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run() -> T:
        began.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main

    done = _started(asyncio.run, run())
    try:
        return done.result()
    except BaseException:
        if not done.done():
            loop, task = began.result(_END_S)
            assert task is not None
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
            futures.wait([done], _END_S)
        raise


def _started(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    done: Future[T] = Future()

    def run() -> None:
        try:
            result = call(*args, **kwargs)
        except BaseException as error:  # the thread's outermost frame: the caller gets any error
            with suppress(InvalidStateError):  # the caller was cancelled
                done.set_exception(error)
        else:
            with suppress(InvalidStateError):
                done.set_result(result)

    name = f"raycore-{getattr(call, '__name__', 'call')}"
    threading.Thread(target=run, name=name, daemon=True).start()
    return done
