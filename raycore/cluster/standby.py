"""Ranks in waiting: processes that have imported all that a rank needs, to take the place of one that dies.

Most of what a rank takes to start goes into its processes: starting Python, importing Ray and torch. A standby is a
rank's actor, with its workers, that has come so far and waits to be told which rank it is. It holds no resources of the
cluster: those of the rank that it replaces stay reserved in that rank's placement group. On the driver's node its
processes are stopped while they wait, so that they cost memory alone.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycore.processes import wait_until_gone

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0

MakeActor = Callable[[dict[str, Any]], Any]
"""Creates a rank's actor that isn't any rank's yet, with these Ray options."""


class Standby:
    """One rank in waiting."""

    def __init__(self, actor: Any, node_id: str) -> None:
        self.actor = actor
        self.node_id = node_id
        self._pids: list[int] = []
        """Of its processes that this one can signal, once they are ready."""

    def wait_until_ready(self, own_node: str) -> None:
        """Raises RayError when it can't be made ready, or isn't in time."""
        pids: list[int] = ray.get(self.actor.stand_by.remote(), timeout=_READY_TIMEOUT_S)
        if self.node_id == own_node:
            self._pids = pids
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Have its processes run again."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End it. A stopped process would not hear that it is to end."""
        self.wake()
        ray.kill(self.actor)
        if wait_until_gone(self._pids, _END_TIMEOUT_S):
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Standbys:
    """The ranks in waiting of one engine, at most one a node. Thread-safe."""

    def __init__(self, make_actor: MakeActor, delay_s: float) -> None:
        """`delay_s`: they start so long after they were asked for, when what is more urgent is done."""
        self._make_actor = make_actor
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._ready: dict[str, Standby] = {}
        """By node."""
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def keep(self, node_ids: Collection[str], own_node: str) -> None:
        """Have one on each of these nodes, in a while."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_closed:
                return
            self._timer = threading.Timer(self._delay_s, self._start, [node_ids, own_node])
            self._timer.name, self._timer.daemon = "raycore-standby", True
            self._timer.start()

    def take(self, node_id: str) -> Any | None:
        """The actor of the one on this node, awake and the caller's from now on; None if there is none."""
        with self._lock:
            standby = self._ready.pop(node_id, None)
        if standby is None:
            return None
        standby.wake()
        return standby.actor

    def close(self) -> None:
        """End them all. Idempotent."""
        with self._lock:
            self._is_closed = True
            timer, ready, self._ready = self._timer, list(self._ready.values()), {}
        if timer is not None:
            timer.cancel()
        for standby in ready:
            standby.end()
        if timer is not None and timer is not threading.current_thread():
            timer.join(_END_TIMEOUT_S)  # it may have one on its way

    def _start(self, node_ids: Collection[str], own_node: str) -> None:
        for node_id in node_ids:
            with self._lock:
                if self._is_closed or node_id in self._ready:
                    continue
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            standby = Standby(self._make_actor({"num_cpus": 0, "scheduling_strategy": where}), node_id)
            try:
                standby.wait_until_ready(own_node)
            except RayError as error:
                logger.warning("no standby on node %s: %s", node_id[:8], error)
                standby.end()
                continue
            with self._lock:
                is_wanted = not self._is_closed
                if is_wanted:
                    self._ready[node_id] = standby
            if not is_wanted:
                standby.end()
