"""Stands in for `asyncio`: Python's own tasks and futures, on an event loop of this world.

The loop has no sockets. It runs in a simulated thread, and other threads may go on between two of its callbacks. It
calls them in the order that Python promises: that in which they were given, and that of their times.
"""

from __future__ import annotations

import asyncio as real
import contextvars
import heapq
import itertools
import sys
import types
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from simulation.world import kernel
from simulation.world.futures import Future, ThreadPoolExecutor
from simulation.world.kernel import pause
from simulation.world.ordered import Ordered
from simulation.world.threads import world

on_end: Callable[[Loop], object] | None = None
"""Called with each loop of `run` when its coroutine is over, before what is left on it is cancelled."""


class Loop(real.AbstractEventLoop):
    """An event loop without sockets."""

    def __init__(self) -> None:
        self._ready: deque[real.Handle] = deque()
        self._timers: list[tuple[float, int, real.TimerHandle]] = []
        self._numbers = itertools.count()
        self._thread: kernel.Thread | None = None
        self._is_stopping = False
        self._is_closed = False
        self._executor: Any = None
        self._on_exception: Callable[..., object] | None = None
        self._task_factory: Any = None
        self._tasks: dict[real.Task[Any], None] = {}
        self.slow_callback_duration = 0.1

    # ---- running

    def run_forever(self) -> None:
        self._check_open()
        if self._thread is not None:
            raise RuntimeError("This event loop is already running")
        if events._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")
        self._thread = world().current
        events._set_running_loop(self)
        try:
            while not self._is_stopping:
                self._run_once()
        finally:
            self._is_stopping = False
            self._thread = None
            events._set_running_loop(None)

    def _run_once(self) -> None:
        here = world()
        while self._timers and self._timers[0][0] <= here.now_s:
            self._ready.append(heapq.heappop(self._timers)[2])
        if not self._ready:
            until_s = self._timers[0][0] if self._timers else None
            here.park("the callbacks of an event loop", None if until_s is None else until_s - here.now_s)
            return
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()
                pause()

    def run_until_complete(self, future: Any) -> Any:
        self._check_open()
        is_new = not real.isfuture(future)
        future = real.ensure_future(future, loop=self)
        if is_new:
            future._log_destroy_pending = False
        future.add_done_callback(self._stop_at_end)
        try:
            self.run_forever()
        except BaseException:
            if is_new and future.done() and not future.cancelled():
                future.exception()
            raise
        finally:
            future.remove_done_callback(self._stop_at_end)
        if not future.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return future.result()

    def _stop_at_end(self, future: Any) -> None:
        self.stop()

    def stop(self) -> None:
        self._is_stopping = True

    def is_running(self) -> bool:
        return self._thread is not None

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if self.is_running():
            raise RuntimeError("Cannot close a running event loop")
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

    # ---- callbacks

    def time(self) -> float:
        return world().now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> real.Handle:
        self._check_open()
        handle = real.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> real.Handle:
        handle = self.call_soon(callback, *args, context=context)
        if self._thread is not None and self._thread is not world().current:
            world().unpark(self._thread)
        pause()
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> real.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> real.TimerHandle:
        self._check_open()
        handle = real.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: real.TimerHandle) -> None:
        pass  # _run_once passes over it

    # ---- tasks, futures and threads

    def create_future(self) -> real.Future[Any]:
        return real.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None, **_: Any) -> real.Task[Any]:
        self._check_open()
        if self._task_factory is not None:
            return self._task_factory(self, coro)
        if context is None:
            task = real.Task(coro, loop=self, name=name)
        else:
            task = context.run(real.Task, coro, loop=self, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: Any) -> None:
        self._tasks.pop(task, None)

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self._check_open()
        if executor is None:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
            executor = self._executor
        return real.wrap_future(executor.submit(func, *args), loop=self)

    def set_default_executor(self, executor: Any) -> None:
        self._executor = executor

    # ---- errors

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._on_exception is not None:
            self._on_exception(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context.get("message"))
        thread = world().current
        assert thread is not None
        world().failures.append((thread, error))

    def set_exception_handler(self, handler: Any) -> None:
        self._on_exception = handler

    def get_exception_handler(self) -> Any:
        return self._on_exception

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        pass

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        thread = world().current
        assert thread is not None
        thread.process.handlers[sig] = lambda *_: self.call_soon_threadsafe(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        thread = world().current
        assert thread is not None
        return thread.process.handlers.pop(sig, None) is not None


def new_event_loop() -> Loop:
    return Loop()


def run(main: Coroutine[Any, Any, Any], *, debug: bool | None = None) -> Any:
    if events._get_running_loop() is not None:
        raise RuntimeError("asyncio.run() cannot be called from a running event loop")
    loop = Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        _end(loop)


def _end(loop: Loop) -> None:
    if on_end is not None:
        on_end(loop)
    tasks = list(loop._tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(real.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def wait(
    fs: Iterable[Any], *, timeout: float | None = None, return_when: str = real.ALL_COMPLETED
) -> tuple[Ordered[Any], Ordered[Any]]:
    """Both results are in the order of `fs`."""
    given = list(dict.fromkeys(fs))
    done, _ = await real.wait(given, timeout=timeout, return_when=return_when)
    return Ordered(each for each in given if each in done), Ordered(each for each in given if each not in done)


async def wait_for(fut: Any, timeout: float | None) -> Any:
    """Waits in the task that asks, as Python's does from 3.12 on, so that a seed has one story in all versions."""
    task, is_late = real.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = None if timeout is None else real.get_running_loop().call_later(timeout, end)
    try:
        return await fut
    except real.CancelledError:
        if not is_late:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise real.TimeoutError from None
    finally:
        if timer is not None:
            timer.cancel()


def all_tasks(loop: Loop | None = None) -> Ordered[real.Task[Any]]:
    loop = loop or real.get_running_loop()  # pyright: ignore[reportAssignmentType]
    assert isinstance(loop, Loop)
    return Ordered(task for task in loop._tasks if not task.done())


async def to_thread(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    context = contextvars.copy_context()
    call = lambda: context.run(func, *args, **kwargs)  # noqa: E731
    return await real.get_running_loop().run_in_executor(None, call)


def wrap_future(future: Any, *, loop: Any = None) -> Any:
    assert isinstance(future, Future) or real.isfuture(future), "a future of another world"
    return real.wrap_future(future, loop=loop)


OWN: dict[str, Any] = {
    "new_event_loop": new_event_loop,
    "run": run,
    "wait": wait,
    "wait_for": wait_for,
    "all_tasks": all_tasks,
    "to_thread": to_thread,
    "wrap_future": wrap_future,
}
"""What isn't Python's own. Whatever isn't here comes from asyncio, which builds it on the running loop."""

REFUSED = ("get_event_loop_policy", "set_event_loop", "get_event_loop", "create_subprocess_exec", "open_connection")


def module() -> types.ModuleType:
    """The module that stands in for asyncio."""
    made = types.ModuleType("asyncio")
    made.__dict__.update({name: value for name, value in vars(real).items() if name not in REFUSED} | OWN)
    return made
