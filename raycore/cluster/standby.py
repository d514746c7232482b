"""Ranks in waiting: processes that have imported all that a rank needs, to take the place of one that dies.

Most of what a rank takes to start goes into its processes: starting Python, importing Ray and torch. A standby is a
rank's actor, with its workers, that has come so far and waits to be told which rank it is. It holds no resources of the
cluster: those of the rank that it replaces stay reserved in that rank's placement group. On the driver's node its
processes are stopped while they wait, so that they cost memory alone.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from raycore.engine.engine_actor import DPEngineCoreActor
from raycore.node.processes import send_signal, wait_until_gone
from raycore.ray_api import get, kill, on_node

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0

MakeActor = Callable[[dict[str, Any]], DPEngineCoreActor]
"""Creates a rank's actor that isn't any rank's yet, with these Ray options."""


class Standby:
    """One rank in waiting."""

    def __init__(self, actor: DPEngineCoreActor, node_id: str) -> None:
        self.actor = actor
        self.node_id = node_id
        self._ready_ref: ObjectRef[list[int]] = actor.stand_by.remote()
        self._pids: list[int] = []
        """Of its processes that this one can signal, once they are ready."""

    def wait_until_ready(self) -> list[int]:
        """Returns its process ids. Raises RayError when it can't be made ready, or isn't in time."""
        return get(self._ready_ref, timeout_s=_READY_TIMEOUT_S)

    def rest(self, pids: list[int]) -> None:
        """Stop its processes, which are this node's."""
        self._pids = pids
        send_signal(self._pids, signal.SIGSTOP)

    def wake(self) -> None:
        """Have its processes run again."""
        send_signal(self._pids, signal.SIGCONT)

    def end(self) -> None:
        """End it. A stopped process would not hear that it is to end."""
        self.wake()
        kill(self.actor)
        if wait_until_gone(self._pids, _END_TIMEOUT_S):
            send_signal(self._pids, signal.SIGKILL)


class Standbys:
    """The ranks in waiting of one engine, at most one a node. Thread-safe."""

    def __init__(self, make_actor: MakeActor) -> None:
        self._make_actor = make_actor
        self._lock = threading.Lock()
        self._ready: dict[str, Standby] = {}
        """By node."""
        self._starting: dict[str, Standby] = {}
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def keep(self, node_ids: Collection[str], own_node: str, delay_s: float) -> None:
        """Have one on each of these nodes: not before `delay_s`, when what is more urgent is done."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._is_closed:
                return
            self._timer = threading.Timer(delay_s, self._start, [node_ids, own_node])
            self._timer.name, self._timer.daemon = "raycore-standby", True
            self._timer.start()

    def take(self, node_id: str) -> DPEngineCoreActor | None:
        """The actor of the one on this node, awake and the caller's from now on; None if there is none.

        It may still be starting: what it is asked to do comes after that.
        """
        with self._lock:
            standby = self._ready.pop(node_id, None) or self._starting.pop(node_id, None)
        if standby is None:
            return None
        standby.wake()
        return standby.actor

    def close(self) -> None:
        """End them all. Idempotent."""
        with self._lock:
            self._is_closed = True
            timer, ready = self._timer, [*self._ready.values(), *self._starting.values()]
            self._ready, self._starting = {}, {}
        if timer is not None:
            timer.cancel()
        for standby in ready:
            standby.end()

    def _start(self, node_ids: Collection[str], own_node: str) -> None:
        with self._lock:
            there = {*self._ready, *self._starting}
            missing = [] if self._is_closed else [node_id for node_id in node_ids if node_id not in there]
            starting = [self._make(node_id) for node_id in missing]
            self._starting |= {standby.node_id: standby for standby in starting}
        for standby in starting:
            try:
                pids = standby.wait_until_ready()
            except RayError as error:
                if self._give_back(standby):
                    logger.warning("no standby on node %s: %s", standby.node_id[:8], error)
                    standby.end()
                continue
            with self._lock:
                if self._starting.pop(standby.node_id, None) is None:
                    continue  # it is a rank by now, or closing has ended it
                if standby.node_id == own_node:
                    standby.rest(pids)
                self._ready[standby.node_id] = standby

    def _give_back(self, standby: Standby) -> bool:
        """Whether nobody else has taken it."""
        with self._lock:
            return self._starting.pop(standby.node_id, None) is not None

    def _make(self, node_id: str) -> Standby:
        return Standby(self._make_actor({"num_cpus": 0, "scheduling_strategy": on_node(node_id)}), node_id)
