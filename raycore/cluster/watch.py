"""Watches the ranks' `run()` refs: a ref that completes, however it completes, is how a rank's end is known."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raycore.cluster.deaths import describe_loss
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo

logger = logging.getLogger(__name__)

OnRankFailure = Callable[[int, EngineDeadError], None]
"""Called with a rank and why it is gone, once for each rank, on the watching thread; must not block."""

_LOOK_UP_S = 0.5
"""How often the thread checks whether it is to end; a completed ref wakes it at once."""

_GET_TIMEOUT_S = 5.0


class RankWatch:
    """One thread that waits on `run_refs`, in rank order, and reports each that completes."""

    def __init__(
        self, run_refs: Sequence[ray.ObjectRef[Any]], infos: Sequence[EngineInfo], on_failure: OnRankFailure
    ) -> None:
        self._ranks = {ref: rank for rank, ref in enumerate(run_refs)}
        self._infos = list(infos)
        self._on_failure = on_failure
        self._expected = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raycore-rank-watch", daemon=True)
        self._thread.start()

    def expect_ends(self) -> None:
        """From now on ranks that end were asked to: report none."""
        self._expected.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, after `expect_ends()`."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        try:
            while self._ranks and not self._expected.is_set():
                done, _ = ray.wait(list(self._ranks), num_returns=1, timeout=_LOOK_UP_S)
                for ref in done:
                    self._report(self._ranks.pop(ref), _error_of(ref))
        except Exception as error:  # the thread's outermost frame: without it nobody would learn of any death
            if not self._expected.is_set():
                logger.exception("the watch over the ranks failed")
                for rank in list(self._ranks.values()):
                    self._on_failure(rank, EngineDeadError(f"{error}\ndp_rank {rank} can't be watched any more"))

    def _report(self, dp_rank: int, error: RayError | None) -> None:
        if self._expected.is_set():
            return
        dead = EngineDeadError(describe_loss(error, self._infos[dp_rank], dp_rank))
        dead.__cause__ = error
        logger.error("%s", dead)
        self._on_failure(dp_rank, dead)


def _error_of(ref: ray.ObjectRef[Any]) -> RayError | None:
    try:
        ray.get(ref, timeout=_GET_TIMEOUT_S)
    except RayError as error:
        return error
    return None
