"""Detects that ranks have ended, by the refs of their `run()` calls and, on this node, by their processes.

A process holds its *lifeline*, a mutex, until it ends: see `raycore.node.lifeline`. Lifelines show the end of a process
within a millisecond. Process descriptors (pidfds), which are also watched, take tens of milliseconds. Ray takes longer,
but it reports the cause, and on other nodes it is the only source. So a rank counts as lost as soon as the end of one
of its processes is noticed. Ray's explanation is added later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ray.exceptions import RayError

from raycore.cluster.failure_reports import dead_process, describe_loss, describe_rank
from raycore.cluster.rank import Rank
from raycore.errors import EngineDeadError
from raycore.node.lifeline import LifelineWatch
from raycore.system import Future, futures, os, select, threading

_EXPLANATION_S = 1.0
"""How long to wait for Ray's explanation of why a rank ended. That usually takes 20 to 50 ms."""


class Ends:
    """Watches a failure domain's ranks until one of them ends. `close()` must be called afterwards."""

    def __init__(self, ranks: Sequence[Rank], own_node: str) -> None:
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._processes: dict[int, tuple[Rank, int]] = {}
        """(rank, pid) of each process, by its pidfd, which becomes readable when the process ends."""
        self._lifelines: list[LifelineWatch] = []
        self._ended: deque[tuple[Rank, int]] = deque()
        self._runs: list[tuple[Rank, Future[None]]] = []
        self._is_closed = False
        self._closing = threading.Lock()
        self._own_node = own_node
        for rank in ranks:
            if rank.run_ref is None:
                continue  # it hasn't come up again: its supervisor knows
            run = rank.run_ref.future()
            self._runs.append((rank, run))
            run.add_done_callback(self._wake)
            for pid in rank.pids_on(own_node):
                with suppress(OSError, AttributeError):  # the process has ended, or the kernel has no pidfds
                    self._processes[os.pidfd_open(pid)] = rank, pid
                lifeline = LifelineWatch.start(pid, partial(self._note_end, rank, pid))
                if lifeline is not None:
                    self._lifelines.append(lifeline)

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        """Wait until any of the ranks ends. Returns an error that says which one, or None after `timeout_s` seconds."""
        poll = select.poll()  # unlike select(), it takes descriptors of any number
        for fd in (self._wake_r, *self._processes):
            poll.register(fd, select.POLLIN)
        ready = poll.poll(1000 * timeout_s)
        if not ready:
            return None
        ended = [*self._ended, *(self._processes[fd] for fd, _ in ready if fd in self._processes)]
        explained = self._explained(0.0)
        if explained is not None or not ended:
            return explained
        rank, pid = ended[0]
        text = f"{describe_rank(rank.info, rank.dp_rank)} died: its process {pid} ended"
        return EngineDeadError(text, pid=pid, node=self._own_node)

    def explain(self, error: EngineDeadError) -> EngineDeadError:
        """Return an error with Ray's explanation for `error`, a result of `wait()`.

        Returns `error` itself if Ray gives no explanation within a second.
        """
        explained = self._explained(_EXPLANATION_S) or error
        if explained.pid is None:  # Ray may report a consequence: the failure of another rank, which lost a peer
            explained.pid, explained.node = error.pid, error.node
        return explained

    def close(self) -> None:
        """Stop watching and close all file descriptors."""
        for lifeline in self._lifelines:
            lifeline.close()
        with self._closing:
            self._is_closed = True
            for fd in (self._wake_r, self._wake_w, *self._processes):
                os.close(fd)

    def _note_end(self, rank: Rank, pid: int) -> None:
        self._ended.append((rank, pid))
        self._wake()

    def _wake(self, _: Any = None) -> None:
        with self._closing:
            if not self._is_closed:
                os.write(self._wake_w, b".")

    def _explained(self, timeout_s: float) -> EngineDeadError | None:
        runs = {run: rank for rank, run in self._runs}
        done, _ = futures.wait(runs, timeout_s, futures.FIRST_COMPLETED)
        return next((_loss(runs[run], run) for run in done), None)


def _loss(rank: Rank, run: Future[None]) -> EngineDeadError:
    error = run.exception()
    assert error is None or isinstance(error, RayError), error
    pid, node = dead_process(error, rank.info)
    dead = EngineDeadError(describe_loss(error, rank.info, rank.dp_rank), pid=pid, node=node)
    dead.__cause__ = error
    return dead
