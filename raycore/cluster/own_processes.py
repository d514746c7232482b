"""How the processes of a local Ray start and end: apart from the program's signals, and never later than the program.

Ray starts its node daemon (raylet) and its store (GCS) in the program's process group. A signal to the group, which is
what a terminal, `timeout` and service managers send, would end them while the program still drains its requests, and a
program without them hangs for a minute. So each gets a session of its own, which their children share, in which the
signals that ask a program to end are blocked. They end with the program: Ray has the kernel kill what it has started
itself, and a reaper kills the rest. Linux only; elsewhere Ray has means of its own.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, cast

from ray._private import services
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET, PROCESS_TYPE_REAPER

from raycore.cluster import session_reaper

ARE_SUPPORTED = sys.platform == "linux"

_BLOCKED = {signal.SIGTERM, signal.SIGHUP}
"""Service managers send SIGTERM to every process of a service. SIGINT is blocked by Ray itself."""


class OwnProcess(services.ConsolePopen):
    """A process of a local Ray's."""

    def __init__(self, *args: Any, preexec_fn: Callable[[], object] = lambda: None, **options: Any) -> None:
        def prepare() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

        def start() -> None:
            super(OwnProcess, self).__init__(*args, preexec_fn=prepare, start_new_session=True, **options)

        _starter.run(start)

    def terminate(self) -> None:
        """End it at once: it does not hear SIGTERM, and has nothing to save."""
        self.kill()


class _Reaper(OwnProcess):
    def __init__(self, leader: int) -> None:
        super().__init__([sys.executable, "-I", "-S", session_reaper.__file__, str(leader)])

    def terminate(self) -> None:
        """It ends by itself when its work is done."""


class _Starter:
    """A thread that starts processes, and lives as long as the program.

    The kernel kills them when the thread that has started them ends: the caller's may do so long before the program.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, start: Callable[[], None]) -> None:
        """Call `start` there, and wait. Raises what it raises."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a forked child has none of its parent's threads
                self._work = SimpleQueue()
                self._thread = threading.Thread(target=_serve, args=(self._work,), name="raycore-starter", daemon=True)
                self._thread.start()
        done: Future[None] = Future()
        self._work.put((start, done))
        done.result()


_Work = tuple[Callable[[], None], Future[None]]


def _serve(work: SimpleQueue[_Work]) -> None:
    while True:
        start, done = work.get()
        try:
            start()
        except BaseException as error:  # the caller's
            done.set_exception(error)
        else:
            done.set_result(None)


_starter = _Starter()

_start_raylet = Node.start_raylet


def start_raylet_and_reaper(node: Node, *args: Any, **options: Any) -> None:
    """In the place of `Node.start_raylet`: the reaper, too, which Ray then waits for when it shuts down."""
    _start_raylet(node, *args, **options)
    processes = cast("dict[str, list[Any]]", node.all_processes)  # pyright: ignore[reportUnknownMemberType]
    raylet = processes[PROCESS_TYPE_RAYLET][0]
    unused = dict.fromkeys(services.ProcessInfo._fields)
    processes[PROCESS_TYPE_REAPER] = [services.ProcessInfo(**unused | {"process": _Reaper(raylet.process.pid)})]
