"""Shields the processes of a local Ray from the program's signals, and makes them end when the program ends.

Ray starts its node daemon (raylet) and its store (GCS) in the program's process group. Terminals, `timeout` and service
managers signal the whole group. That would end Ray while the program still drains its requests, and without Ray the
program hangs for a minute. Therefore each of Ray's processes gets its own session, which its children share, and has
the termination signals blocked. When the program ends, the kernel kills the processes that the program started for Ray.
A reaper process kills the raylet's children. Linux only: on other systems, Ray's processes run as Ray starts them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, cast

from ray._private import services
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET, PROCESS_TYPE_REAPER

from raycore.cluster import session_reaper

ARE_SUPPORTED = sys.platform == "linux"

_BLOCKED = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
"""The signals that are blocked in Ray's processes, because service managers send SIGTERM to every process of a service,
and terminals send SIGHUP and SIGINT to their foreground group."""


class OwnProcess(services.ConsolePopen):
    """A process of a local Ray, in its own session, with termination signals blocked. A raylet also gets a reaper."""

    reaper: OwnProcess | None = None

    def __init__(self, command: Sequence[str], *args: Any, **options: Any) -> None:
        def start() -> None:
            super(OwnProcess, self).__init__(command, *args, start_new_session=True, **options)
            if command[0] == services.RAYLET_EXECUTABLE:
                # started on the starter's thread, where no signal can interrupt between the two starts
                self.reaper = _Reaper(self.pid)

        _starter.run(start)

    def terminate(self) -> None:
        """Kill the process with SIGKILL, because SIGTERM is blocked. The process has nothing to save."""
        self.kill()


class _Reaper(OwnProcess):
    """A process that kills a raylet's children once the raylet has ended."""

    def __init__(self, leader: int) -> None:
        super().__init__([sys.executable, "-I", "-S", session_reaper.__file__, str(leader)])

    def terminate(self) -> None:
        """Do nothing: the reaper ends by itself after it has killed the raylet's children."""


class _Starter:
    """Starts processes on a thread that lives as long as the program.

    The kernel kills each of these processes when the thread that started the process ends. The caller's thread may end
    before the program does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, start: Callable[[], None]) -> None:
        """Call `start` on the starter's thread, and wait until it returns. Raises what `start` raises."""
        if threading.current_thread() is self._thread:
            start()
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a forked child lacks its parent's threads
                self._work = SimpleQueue()
                self._thread = threading.Thread(target=_serve, args=(self._work,), name="raycore-starter", daemon=True)
                self._thread.start()
        done: Future[None] = Future()
        self._work.put((start, done))
        done.result()


_Work = tuple[Callable[[], None], Future[None]]


def _serve(work: SimpleQueue[_Work]) -> None:
    # Processes inherit this. Blocking the signals in the process instead would be too late: until then, it runs the
    # program's own signal handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    while True:
        start, done = work.get()
        try:
            start()
        except BaseException as error:  # raised in the caller
            done.set_exception(error)
        else:
            done.set_result(None)


_starter = _Starter()

_start_raylet = Node.start_raylet


def start_raylet_and_reaper(node: Node, *args: Any, **options: Any) -> None:
    """Replacement for `Node.start_raylet` that also registers the raylet's reaper with Ray.

    Ray's shutdown then waits for the reaper to end.
    """
    _start_raylet(node, *args, **options)
    processes = cast("dict[str, list[Any]]", node.all_processes)  # pyright: ignore[reportUnknownMemberType]
    raylet = processes[PROCESS_TYPE_RAYLET][0]
    unused = dict.fromkeys(services.ProcessInfo._fields)
    processes[PROCESS_TYPE_REAPER] = [services.ProcessInfo(**unused | {"process": raylet.process.reaper})]
