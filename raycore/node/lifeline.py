"""Lets a process notice at once that another process on its node has ended, for any reason.

When a process ends, the kernel frees the process's memory before it closes the process's sockets and reports the exit.
If torch is loaded, this takes 30 to 60 ms. But the kernel releases robust mutexes before it frees the memory. So each
process of raycore has a *lifeline*: a robust mutex that it locks for as long as it lives, in memory that other
processes on the node can open. A process that watches another one waits for that mutex. Where there is no lifeline, the
end of a process is noticed later, by other means.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raycore.node import shared_memory
from raycore.system import os, threading, time

_NAME = "raycore-lifeline"
_SHARED = 1
_ROBUST = 1
"""`_SHARED` and `_ROBUST` are PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST in the C libraries of Linux."""
_EOWNERDEAD = 130
_ENOTRECOVERABLE = 131
_ETIMEDOUT = 110
_ATTRIBUTES_BYTES = 64
"""At least the size of a pthread_mutexattr_t on any processor."""
_POLL_INTERVAL_S = 1.0
"""How often, in seconds, a watch checks whether it has been closed."""

_locker: threading.Thread | None = None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def lock() -> None:
    """Create this process's lifeline, locked until the process ends. Does nothing if called again or not on Linux."""
    global _locker
    if sys.platform != "linux" or _locker is not None:
        return
    libc = ctypes.CDLL(None)
    memory, _ = shared_memory.create(_NAME, mmap.PAGESIZE)
    mutex = _address(memory)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, _SHARED)
    libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    libc.pthread_mutex_init(mutex, attributes)
    is_locked = threading.Event()

    def lock_forever() -> None:
        libc.pthread_mutex_lock(mutex)
        is_locked.set()
        threading.Event().wait()
        memory.close()  # never reached, but keeps the mutex's memory open

    # in a thread of its own, because a robust mutex is released when the thread that locked it ends
    _locker = threading.Thread(target=lock_forever, name="raycore-lifeline", daemon=True)
    _locker.start()
    is_locked.wait()


class LifelineWatch:
    """Waits, in a thread of its own, for the end of another process, which must have a lifeline."""

    def __init__(self, memory: mmap.mmap, on_end: Callable[[], None]) -> None:
        self._memory = memory
        self._on_end = on_end
        self._is_closed = False
        threading.Thread(target=self._wait, name="raycore-lifeline-watch", daemon=True).start()

    @staticmethod
    def start(pid: int, on_end: Callable[[], None]) -> LifelineWatch | None:
        """Call `on_end` when process `pid` ends. Returns None if this process can't open the lifeline of `pid`."""
        memory = _find(pid)
        return LifelineWatch(memory, on_end) if memory is not None else None

    def close(self) -> None:
        """Stop watching: `on_end` is no longer called. Doesn't wait for the thread, which ends within a second."""
        self._is_closed = True

    def _wait(self) -> None:
        libc = ctypes.CDLL(None)
        mutex = _address(self._memory)
        while not self._is_closed:
            seconds, fraction = divmod(time.time() + _POLL_INTERVAL_S, 1)
            until = _Timespec(int(seconds), int(fraction * 1e9))
            result: int = libc.pthread_mutex_timedlock(mutex, ctypes.byref(until))
            if result == _ETIMEDOUT:
                continue
            if result in (0, _EOWNERDEAD):
                libc.pthread_mutex_unlock(mutex)
            if result in (_EOWNERDEAD, _ENOTRECOVERABLE) and not self._is_closed:
                self._on_end()
            return


def _find(pid: int) -> mmap.mmap | None:
    with suppress(OSError):  # the process has ended, or belongs to another user
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the descriptor was closed meanwhile
                if os.readlink(link).startswith(f"/memfd:{_NAME} "):
                    return shared_memory.open_at(str(link), mmap.PAGESIZE)
    return None


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
