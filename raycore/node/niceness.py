"""Runs work at a low priority, so that threads that compute go first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from raycore.system import Future, os, threading

T = TypeVar("T")

_NICENESS = 10
"""Is added to the process's own niceness. Beside a busy thread, such a thread gets a tenth of a core."""


def run_yielding(work: Callable[[], T]) -> T:
    """Run `work` in a new thread that yields the cores to busy threads of this machine. Returns its result, or raises.

    On Linux a thread has a niceness of its own. It may raise it but not lower it again, hence the new thread. Other
    systems only know the niceness of a process: there `work` runs at the process's own.
    """
    future: Future[T] = Future()

    def run() -> None:
        if sys.platform.startswith("linux"):
            os.nice(_NICENESS)
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="raycore-yielding", daemon=True).start()
    return future.result()
