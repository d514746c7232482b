"""Stands in for `threading`."""

from __future__ import annotations

import itertools
import sys
import threading as real
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simulation.world import kernel, notices
from simulation.world.kernel import ProcessExit, World, pause

TIMEOUT_MAX = real.TIMEOUT_MAX
ThreadError = real.ThreadError
BrokenBarrierError = real.BrokenBarrierError


def world() -> World:
    assert kernel.the_world is not None, "no world runs"
    return kernel.the_world


def _timeout(blocking: bool, timeout: float | None) -> float | None:
    """How long to wait at most: None for ever."""
    if not blocking:
        return 0.0
    return None if timeout is None or timeout < 0 else timeout


def wait_among(waiting: list[kernel.Thread], what: str, until_s: float | None) -> bool:
    """Wait as one of these threads, which whoever wakes it removes. Returns False if it became `until_s` before.

    `what`: the thing that is waited for, for reports.
    """
    here = world()
    thread = here.current
    assert thread is not None
    waiting.append(thread)
    try:
        return here.park(what, None if until_s is None else until_s - here.now_s)
    finally:
        if thread in waiting:
            waiting.remove(thread)


def wake_any(waiting: list[kernel.Thread]) -> None:
    """Wake one of these threads, if there are any. The seed decides which."""
    if waiting:
        here = world()
        thread = here.choose(waiting)
        waiting.remove(thread)
        here.unpark(thread)


class Lock:
    """A lock. Who waits for it is woken in any order, and whoever comes meanwhile may take it first."""

    def __init__(self) -> None:
        self.owner: object = None
        """The thread that has it."""
        self._waiting: list[kernel.Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        pause()
        if self.owner is not None:
            limit_s = _timeout(blocking, timeout)
            if limit_s == 0.0:
                return False
            until_s = None if limit_s is None else world().now_s + limit_s
            while self.owner is not None:
                try:
                    woken = wait_among(self._waiting, f"a lock that {self.owner!r} has", until_s)
                except BaseException:  # of a signal's handler: another one may have the lock instead
                    if self.owner is None:
                        wake_any(self._waiting)
                    raise
                if not woken and self.owner is not None:
                    return False
        self.owner = _current() or "the importing thread"
        return True

    __enter__ = acquire

    def release(self) -> None:
        if self.owner is None:
            raise RuntimeError("release unlocked lock")
        self.owner = None
        if self._waiting:
            wake_any(self._waiting)
        pause()

    def locked(self) -> bool:
        pause()
        return self.owner is not None

    def __exit__(self, *exc: object) -> None:
        self.release()


class RLock:
    """A lock that its owner may take again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.owner is not None and self._is_owned():
            self._depth += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth = 1
        return True

    __enter__ = acquire

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._lock.release()

    def __exit__(self, *exc: object) -> None:
        self.release()

    @property
    def owner(self) -> object:
        return self._lock.owner

    def _is_owned(self) -> bool:
        return self._lock.owner is (_current() or "the importing thread")

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 0
        self._lock.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self._lock.acquire()
        self._depth = depth


class Condition:
    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._lock = lock if lock is not None else RLock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self._waiting: list[kernel.Thread] = []
        self._num_notices = 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    @property
    def owner(self) -> object:
        return self._lock.owner

    def _is_owned(self) -> bool:
        return self._lock._is_owned() if isinstance(self._lock, RLock) else self._lock.owner is not None

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        here = world()
        thread = here.current
        assert thread is not None
        num_notices, began_s = self._num_notices, here.now_s
        self._waiting.append(thread)
        depth = self._lock._release_save() if isinstance(self._lock, RLock) else self._lock.release()
        try:
            # a notice may have come while the lock's release let others run
            if thread in self._waiting:
                here.park("a condition", timeout)
            is_noticed = thread not in self._waiting
        finally:
            if thread in self._waiting:
                self._waiting.remove(thread)
            if isinstance(self._lock, RLock):
                self._lock._acquire_restore(depth or 1)
            else:
                self._lock.acquire()
        if num_notices == self._num_notices:
            notices.look(sys._getframe(1), began_s)
        return is_noticed

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        began_s, num_notices = world().now_s, self._num_notices
        until_s = None if timeout is None else began_s + timeout
        has_waited = False
        while not (result := predicate()):
            left_s = None if until_s is None else until_s - world().now_s
            if left_s is not None and left_s <= 0:
                break
            num_notices, has_waited = self._num_notices, True
            self.wait(left_s)
        if result and has_waited and num_notices == self._num_notices and notices.is_product(sys._getframe(1)):
            notices.note(sys._getframe(1), began_s)
        return result

    def notify(self, n: int = 1) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        self._num_notices += 1
        while n > 0 and self._waiting:
            thread = self._waiting.pop(0)
            kernel.the_world.unpark(thread)  # pyright: ignore[reportOptionalMemberAccess]
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[kernel.Thread] = []

    def is_set(self) -> bool:
        pause()
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            world().unpark(thread)
        pause()

    def clear(self) -> None:
        self._is_set = False
        pause()

    def wait(self, timeout: float | None = None) -> bool:
        pause()
        if self._is_set:
            return True
        until_s = None if timeout is None else world().now_s + timeout
        return wait_among(self._waiting, "an event", until_s) or self._is_set


class Semaphore:
    def __init__(self, value: int = 1) -> None:
        if value < 0:
            raise ValueError("semaphore initial value must be >= 0")
        self._condition = Condition(Lock())
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        limit_s = _timeout(blocking, timeout)
        with self._condition:
            if limit_s == 0.0 and not self._value:
                return False
            if not self._condition.wait_for(lambda: self._value, limit_s):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._condition:
            self._value += n
            self._condition.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class BoundedSemaphore(Semaphore):
    def __init__(self, value: int = 1) -> None:
        super().__init__(value)
        self._initial = value

    def release(self, n: int = 1) -> None:
        with self._condition:
            if self._value + n > self._initial:
                raise ValueError("Semaphore released too many times")
            self._value += n
            self._condition.notify(n)


_keys = itertools.count()


class local:  # noqa: N801 - as in threading
    """Attributes of which each thread has its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> local:
        self = super().__new__(cls)
        object.__setattr__(self, "__key__", next(_keys))
        return self

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        try:
            return _values(self)[name]
        except KeyError:
            return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _values(self)[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in _values(self):
            raise AttributeError(name)
        del _values(self)[name]


_outside: dict[int, dict[str, Any]] = {}
"""The values outside of a world."""


def _key(owner: local) -> int:
    return object.__getattribute__(owner, "__key__")


def _values(owner: local) -> dict[str, Any]:
    thread = _current()
    return (_outside if thread is None else thread.values).setdefault(_key(owner), {})


class Thread:
    _name_prefix = "Thread"

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name = name or (getattr(target, "__name__", "") or self._name_prefix)
        self.daemon = current_thread().daemon if daemon is None and _current() is not None else bool(daemon)
        self._thread: kernel.Thread | None = None
        self._is_over = Event()

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        here = world()
        assert here.current is not None
        process = here.current.process
        self._thread = here.start(process, self.name, self._run_all)
        self._thread.values[_key(_OWN)] = {"thread": self}
        pause()

    def _run_all(self) -> None:
        try:
            self.run()
        except ProcessExit:
            raise
        except BaseException as error:
            if not isinstance(error, SystemExit):
                assert self._thread is not None
                world().failures.append((self._thread, error))
        self._is_over.set()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        if self._thread is None:
            raise RuntimeError("cannot join thread before it is started")
        if self._thread is _current():
            raise RuntimeError("cannot join current thread")
        self._is_over.wait(timeout)

    def is_alive(self) -> bool:
        pause()
        return self._thread is not None and not self._is_over._is_set

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.number

    native_id = ident


_OWN = local()
"""Which `Thread` a thread of the world is."""


class _Main(Thread):
    """A thread that wasn't started by a `Thread`: a process's first one."""

    def __init__(self, thread: kernel.Thread) -> None:
        super().__init__(name="MainThread", daemon=thread is not thread.process.main_thread)
        self._thread = thread

    def is_alive(self) -> bool:
        return True


class Timer(Thread):
    def __init__(self, interval: float, function: Callable[..., object], args: Any = None, kwargs: Any = None) -> None:
        super().__init__(name="Timer")
        self.interval, self.function, self.args, self.kwargs = interval, function, args or (), kwargs or {}
        self.finished = Event()

    def cancel(self) -> None:
        self.finished.set()

    def run(self) -> None:
        self.finished.wait(self.interval)
        if not self.finished.is_set():
            self.function(*self.args, **self.kwargs)
        self.finished.set()


def _current() -> kernel.Thread | None:
    return None if kernel.the_world is None else kernel.the_world.current


def _thread_of(thread: kernel.Thread) -> Thread:
    own = thread.values.setdefault(_key(_OWN), {})
    if "thread" not in own:
        own["thread"] = _Main(thread)
    return own["thread"]


def current_thread() -> Thread:
    thread = _current()
    assert thread is not None
    return _thread_of(thread)


def main_thread() -> Thread:
    thread = _current()
    assert thread is not None
    return _thread_of(thread.process.main_thread)


def get_ident() -> int:
    thread = _current()
    return 0 if thread is None else thread.number


get_native_id = get_ident


def enumerate() -> list[Thread]:
    thread = _current()
    assert thread is not None
    return [_thread_of(each) for each in thread.process.threads if not each.is_over]


def active_count() -> int:
    return len(enumerate())


def stack_size(size: int = 0) -> int:
    """No effect: simulated threads have no stack of their own."""
    return 0
