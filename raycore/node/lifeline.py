"""Lets a process notice at once that another process on its node has ended, for any reason.

When a process ends, the kernel frees its memory before it closes its sockets and reports the exit. That takes 30 to
60 ms if torch is loaded. Robust mutexes are released earlier. So each process locks one for as long as it lives, its
lifeline, in memory that other processes of the node can open, and they wait for that lock. Where no lifeline is
available, the end of a process is noticed by the slower signs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raycore.node import shared_memory

_NAME = "raycore-lifeline"
_SHARED = 1
_ROBUST = 1
"""PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST in the C libraries of Linux."""
_EOWNERDEAD = 130
_ENOTRECOVERABLE = 131
_ETIMEDOUT = 110
_ATTRIBUTES_BYTES = 64
"""At least the size of a pthread_mutexattr_t on any processor."""
_POLL_INTERVAL_S = 1.0
"""How often a watch checks whether it has been closed."""

_held: threading.Thread | None = None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold() -> None:
    """Lock this process's lifeline until it ends. Does nothing on other systems than Linux, or if called again."""
    global _held
    if sys.platform != "linux" or _held is not None:
        return
    libc = ctypes.CDLL(None)
    memory, _ = shared_memory.create(_NAME, mmap.PAGESIZE)
    mutex = _address(memory)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, _SHARED)
    libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    libc.pthread_mutex_init(mutex, attributes)
    is_held = threading.Event()

    def hold_on() -> None:
        libc.pthread_mutex_lock(mutex)
        is_held.set()
        threading.Event().wait()
        memory.close()  # never reached: the mutex is in this memory

    # in a thread of its own, because a robust mutex is released when the thread that locked it ends
    _held = threading.Thread(target=hold_on, name="raycore-lifeline", daemon=True)
    _held.start()
    is_held.wait()


class Watch:
    """Waits in a thread of its own for the end of a process that holds a lifeline."""

    def __init__(self, memory: mmap.mmap, on_end: Callable[[], None]) -> None:
        self._memory = memory
        self._on_end = on_end
        self._is_closed = False
        threading.Thread(target=self._wait, name="raycore-lifeline-watch", daemon=True).start()

    @staticmethod
    def start(pid: int, on_end: Callable[[], None]) -> Watch | None:
        """Call `on_end` when the process ends. Returns None if it has no lifeline that this process can open."""
        memory = _find(pid)
        return Watch(memory, on_end) if memory is not None else None

    def close(self) -> None:
        """Stop watching. The thread ends within a second."""
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
    with suppress(OSError):  # it has ended, or is another user's
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                if os.readlink(link).startswith(f"/memfd:{_NAME} "):
                    return shared_memory.open_at(str(link), mmap.PAGESIZE)
    return None


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
