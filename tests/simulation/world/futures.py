"""Stands in for `concurrent.futures`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures as real
from concurrent.futures import _base
from dataclasses import dataclass
from typing import Any, NamedTuple

from simulation.world import kernel
from simulation.world.kernel import pause
from simulation.world.ordered import Ordered
from simulation.world.queues import Empty, SimpleQueue
from simulation.world.threads import Condition, Lock, Thread, world

FIRST_COMPLETED = real.FIRST_COMPLETED
FIRST_EXCEPTION = real.FIRST_EXCEPTION
ALL_COMPLETED = real.ALL_COMPLETED
CancelledError = real.CancelledError
TimeoutError = real.TimeoutError
InvalidStateError = real.InvalidStateError
BrokenExecutor = real.BrokenExecutor
Executor = real.Executor


@dataclass(frozen=True)
class _Callback:
    """Python logs what a future's callback raises. Here, it is a failure."""

    function: Callable[[Any], object]

    def __call__(self, future: Any) -> None:
        try:
            self.function(future)
        except Exception as error:
            if kernel.the_world is not None:
                kernel.the_world.fail(error)
            raise


class Future(real.Future):
    """Python's own, with a condition of this world. asyncio knows it by its class."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()

    def done(self) -> bool:
        pause()
        return super().done()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        super().add_done_callback(_Callback(fn))

    def __repr__(self) -> str:
        return f"<Future {self._state}>"


class _Done(NamedTuple):
    done: Any
    not_done: Any


def wait(fs: Iterable[Future], timeout: float | None = None, return_when: str = ALL_COMPLETED) -> _Done:
    """Both results are in the order of `fs`."""
    all_of: list[Any] = list(dict.fromkeys(fs))
    condition = Condition(Lock())

    def is_over() -> bool:
        done = [future for future in all_of if _is_done(future)]
        return (
            len(done) == len(all_of)
            or (return_when == FIRST_COMPLETED and bool(done))
            or (return_when == FIRST_EXCEPTION and any(_has_failed(future) for future in done))
        )

    def notice(_: object) -> None:
        with condition:
            condition.notify_all()

    if all_of and not is_over():
        for future in all_of:
            future.add_done_callback(notice)
        with condition:
            condition.wait_for(is_over, timeout)
        for future in all_of:
            if _Callback(notice) in future._done_callbacks:
                future._done_callbacks.remove(_Callback(notice))
    done = [future for future in all_of if _is_done(future)]
    return _Done(Ordered(done), Ordered(future for future in all_of if future not in done))


def _is_done(future: Future) -> bool:
    return future._state in (_base.CANCELLED, _base.CANCELLED_AND_NOTIFIED, _base.FINISHED)


def _has_failed(future: Future) -> bool:
    return future._state == _base.FINISHED and future._exception is not None


def as_completed(fs: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    until_s = None if timeout is None else world().now_s + timeout
    left = list(dict.fromkeys(fs))
    while left:
        left_s = None if until_s is None else until_s - world().now_s
        done, rest = wait(left, left_s, FIRST_COMPLETED)
        if not done:
            raise TimeoutError(f"{len(left)} (of {len(left)}) futures unfinished")
        yield from done
        left = list(rest)


class ThreadPoolExecutor(Executor):
    """Has a thread for each call that waits, up to `max_workers`."""

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "pool",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._max_workers = max_workers or 8
        self._prefix = thread_name_prefix
        self._initializer, self._initargs = initializer, initargs
        self._calls = SimpleQueue()
        self._lock = Lock()
        self._num_idle = 0
        self._threads: list[Thread] = []
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future = Future()
            self._calls.put((future, fn, args, kwargs))
            if self._num_idle:
                self._num_idle -= 1
            elif len(self._threads) < self._max_workers:
                thread = Thread(target=self._work, name=f"{self._prefix}_{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            return future

    def _work(self) -> None:
        if self._initializer is not None:
            self._initializer(*self._initargs)
        while (call := self._next()) is not None:
            future, fn, args, kwargs = call
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del call, future, fn, args, kwargs
        self._calls.put(None)  # for the others

    def _next(self) -> Any:
        """The next call. None: there will be none."""
        try:
            return self._calls.get_nowait()
        except Empty:
            with self._lock:
                self._num_idle += 1
            return self._calls.get()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_shut_down = True
            if cancel_futures:
                while not self._calls.empty():
                    call = self._calls.get()
                    if call is not None:
                        call[0].cancel()
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
