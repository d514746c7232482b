"""Ends the processes of ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raycore.cluster.rank import Rank
from raycore.cluster.runtime import Runtime
from raycore.system import signal

logger = logging.getLogger(__name__)

_KILLED_TIMEOUT_S = 5.0
"""How long to wait for killed processes to end. That takes milliseconds, unless they or the machine are stuck."""


class RankEnds:
    """Ends ranks of one engine."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def stop(self, ranks: Sequence[Rank], timeout_s: float, own_node: str) -> None:
        """Have ranks stop, and kill those that still run after `timeout_s`.

        `own_node`: the id of the node on which this process runs.
        """
        run_refs = [rank.run_ref for rank in ranks if rank.run_ref is not None]
        if run_refs and timeout_s > 0:
            for rank in ranks:
                rank.actor.stop.remote()
            self._runtime.wait(run_refs, num_returns=len(run_refs), timeout_s=timeout_s)
        for rank in ranks:
            self._runtime.end(rank.actor)
        pids = [pid for rank in ranks for pid in rank.pids_on(own_node)]
        if self._runtime.wait_until_gone(pids, _KILLED_TIMEOUT_S):
            for rank in ranks:
                self.kill(rank, own_node)
            running = self._runtime.wait_until_gone(pids, _KILLED_TIMEOUT_S)
            if running:
                logger.warning("processes %s are still running %g s after they were killed", running, _KILLED_TIMEOUT_S)

    def kill(self, rank: Rank, own_node: str) -> None:
        """Kill a rank's processes through Ray, and with SIGKILL too if the rank is on this node.

        Ray alone is slow, because it first asks a process to exit. A process stopped by SIGSTOP doesn't react, and the
        workers of a failed engine react late, while the rank's successor waits for their resources.
        """
        self._runtime.end(rank.actor)
        self._runtime.send_signal(rank.pids_on(own_node), signal.SIGKILL)
