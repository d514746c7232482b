"""Shields processes from the program's signals, and makes them end when the program ends. Linux only.

Each process gets its own session, which its children share, and has the termination signals blocked. When the program
ends, the kernel kills the processes that the program started for Ray. A `session_reaper` kills the raylet's children.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from raycore.cluster.local_ray import session_reaper
from raycore.system import Future, SimpleQueue, os, signal, subprocess, threading

_BLOCKED = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
"""The signals that are blocked in Ray's processes, because service managers send SIGTERM to every process of a service,
and terminals send SIGHUP and SIGINT to their foreground group."""

_reapers: list[subprocess.Popen[bytes]] = []


class RayProcess(subprocess.Popen[bytes]):
    """A process of a local Ray, in its own session, with termination signals blocked. A raylet also gets a reaper."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        def start() -> None:
            super(RayProcess, self).__init__(command, start_new_session=True, **options)
            if os.path.basename(command[0]) == "raylet":
                # started on the starter's thread, where no signal can interrupt between the two starts
                reaper = [sys.executable, "-I", "-S", session_reaper.__file__, str(self.pid)]
                _reapers.append(subprocess.Popen(reaper, start_new_session=True))

        _living_starter().call(start)

    def terminate(self) -> None:
        """Kill the process with SIGKILL, because SIGTERM is blocked. The process has nothing to save."""
        self.kill()


def wait_for_reapers(timeout_s: float) -> None:
    """Wait until no child is left of the raylets, which have ended: for each at most `timeout_s` seconds."""
    while _reapers:
        with suppress(subprocess.TimeoutExpired):
            _reapers.pop().wait(timeout_s)


class _Starter(threading.Thread):
    """Starts processes on a thread that lives as long as the program.

    The kernel kills each of these processes when the thread that started the process ends. The caller's thread may end
    before the program does.
    """

    def __init__(self) -> None:
        super().__init__(name="raycore-starter", daemon=True)
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self.start()

    def call(self, start: Callable[[], None]) -> None:
        """Call `start` on this thread, and wait until it returns. Raises what `start` raises."""
        done: Future[None] = Future()
        self._work.put((start, done))
        done.result()

    def run(self) -> None:
        # Processes inherit this. Blocking the signals in the process instead would be too late: until then, it runs the
        # program's own signal handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        while True:
            start, done = self._work.get()
            try:
                start()
            except BaseException as error:  # raised in the caller
                done.set_exception(error)
            else:
                done.set_result(None)


_lock = threading.Lock()
_last_starter: _Starter | None = None


def _living_starter() -> _Starter:
    global _last_starter
    with _lock:
        if _last_starter is None or not _last_starter.is_alive():  # a forked child lacks its parent's threads
            _last_starter = _Starter()
        return _last_starter
