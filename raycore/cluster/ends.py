"""Waits for the ends of ranks: for their run refs and, on this node, for their processes.

The kernel tells of a process's end within a millisecond. Ray's word takes some ten times as long, and more on a busy
machine, but says why, and is all that there is of other nodes. So a process's end counts at once, and is explained
afterwards.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError

from raycore.cluster.deaths import describe_loss, describe_rank
from raycore.cluster.rank import Rank
from raycore.errors import EngineDeadError

_EXPLANATION_S = 1.0
"""Ray's account of an end follows it by some 20 to 50 ms."""


class Ends:
    """The ends of a unit's ranks. To be closed."""

    def __init__(self, ranks: Sequence[Rank], own_node: str) -> None:
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._processes: dict[int, tuple[Rank, int]] = {}
        """By the file descriptor that becomes readable when it ends: whose process, and which."""
        self._runs: dict[int, tuple[Rank, Future[Any]]] = {}
        self._is_closed = False
        for rank in ranks:
            assert rank.run_ref is not None, "confirm() comes first"
            run: Future[Any] = rank.run_ref.future()
            self._runs[rank.dp_rank] = rank, run
            run.add_done_callback(self._wake)
            for pid in rank.pids_on(own_node):
                with suppress(OSError, AttributeError):  # it has ended, or this kernel has no such descriptors
                    self._processes[os.pidfd_open(pid)] = rank, pid

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        """The first end, if there is one within `timeout_s`."""
        ready, _, _ = select.select([self._wake_r, *self._processes], [], [], timeout_s)
        if not ready:
            return None
        ended = [self._processes[fd] for fd in ready if fd in self._processes]
        explained = self._explained(0.0)
        if explained is not None or not ended:
            return explained
        rank, pid = ended[0]
        return EngineDeadError(f"{describe_rank(rank.info, rank.dp_rank)} died: its process {pid} ended")

    def explain(self, error: EngineDeadError) -> EngineDeadError:
        """Ray's account of `error`, which `wait()` gave; or that itself where Ray has none within a second."""
        return self._explained(_EXPLANATION_S) or error

    def close(self) -> None:
        """Let go of what is watched."""
        self._is_closed = True
        for fd in (self._wake_r, self._wake_w, *self._processes):
            os.close(fd)

    def _wake(self, run: Future[Any]) -> None:
        if not self._is_closed:
            with suppress(OSError):
                os.write(self._wake_w, b".")

    def _explained(self, timeout_s: float) -> EngineDeadError | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            for rank, run in self._runs.values():
                if run.done():
                    return _loss(rank, run)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            select.select([self._wake_r], [], [], left_s)


def _loss(rank: Rank, run: Future[Any]) -> EngineDeadError:
    error = run.exception()
    assert error is None or isinstance(error, RayError), error
    dead = EngineDeadError(describe_loss(error, rank.info, rank.dp_rank))
    dead.__cause__ = error
    return dead
