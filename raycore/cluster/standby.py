"""Standbys: processes that have imported everything a rank needs, ready to replace a rank that dies.

Most of a rank's start-up time goes into starting Python and importing Ray and torch. A standby is an engine actor with
its workers, whose processes have started and imported everything, and which wait to become a rank. A standby reserves
no cluster resources: when it replaces a rank, it uses those that the rank's placement group still holds, GPUs included.
On the driver's node, the processes of a standby are stopped (SIGSTOP) while they wait, so that they use memory but no
CPU.

A standby imports at a low priority, so that it hardly slows down the ranks. On a busy node that takes a while, and a
rank that is lost meanwhile is replaced sooner by new processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from raycore.cluster.failure_reports import describe_death
from raycore.system import signal, threading

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.runtime import Runtime
    from raycore.engine.engine_actor import DPEngineCoreActor

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 5.0


class Standby:
    """One standby: an engine actor, with its workers, that waits to become a rank."""

    def __init__(self, actor: DPEngineCoreActor, node_id: str, runtime: Runtime) -> None:
        self.actor = actor
        self.node_id = node_id
        self._runtime = runtime
        self._ready_ref: ObjectRef[list[int]] = actor.stand_by.remote()
        self._pids: list[int] = []
        """The ids of the standby's stopped processes. Empty if they weren't stopped, as on other nodes."""

    def wait_until_ready(self) -> list[int]:
        """Wait until the standby is ready, and return its process ids.

        Raises RayError if the standby fails or isn't ready within 300 s.
        """
        return self._runtime.get(self._ready_ref, timeout_s=_READY_TIMEOUT_S)

    def rest(self, pids: list[int]) -> None:
        """Stop the standby's processes, `pids`, with SIGSTOP. They must be on this node."""
        self._pids = pids
        self._runtime.send_signal(self._pids, signal.SIGSTOP)

    def wake(self) -> None:
        """Let the stopped processes continue."""
        self._runtime.send_signal(self._pids, signal.SIGCONT)

    def abandon(self) -> None:
        """Kill the stopped processes without Ray, which is gone: its own end doesn't reach them."""
        self._runtime.send_signal(self._pids, signal.SIGKILL)

    def end(self) -> None:
        """End the standby. Wakes its processes first: a stopped process doesn't react to Ray's request to exit."""
        self.wake()
        self._runtime.end(self.actor)
        if self._runtime.wait_until_gone(self._pids, _END_TIMEOUT_S):
            self._runtime.send_signal(self._pids, signal.SIGKILL)


class NoStandbys:
    """In the place of `Standbys`, of an engine that keeps none."""

    def keep(self, node_ids: Collection[str], own_node: str, delay_s: float) -> None:
        """See `Standbys`, as for the other methods."""

    def take(self, node_id: str) -> DPEngineCoreActor | None:
        return None

    def close(self, *, without_ray: bool = False) -> None:
        pass


class Standbys:
    """The standbys of one engine, at most one per node. Thread-safe."""

    def __init__(self, make_actor: Callable[[str], DPEngineCoreActor], runtime: Runtime) -> None:
        """`make_actor`: creates, on the node with the given id, an engine actor that isn't any rank yet."""
        self._make_actor = make_actor
        self._runtime = runtime
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        """Held while standbys are created, so that a node doesn't get two."""
        self._ready: dict[str, Standby] = {}
        """Standbys that have started, by node id."""
        self._starting: dict[str, Standby] = {}
        """Standbys that are still starting, by node id."""
        self._cancelled = threading.Event()
        """Set when the delay of the latest `keep()` must not end in a start."""
        self._is_closed = False

    def keep(self, node_ids: Collection[str], own_node: str, delay_s: float) -> None:
        """Start a standby on each of these nodes that has none, after `delay_s` seconds.

        The delay leaves the CPUs to more urgent work. A new call replaces a call whose delay hasn't passed.
        """
        with self._lock:
            self._cancelled.set()
            if self._is_closed:
                return
            self._cancelled = threading.Event()
            run = partial(self._start_later, delay_s, self._cancelled, node_ids, own_node)
            self._runtime.clock.start_thread("raycore-standby", run)

    def take(self, node_id: str) -> DPEngineCoreActor | None:
        """Remove the standby on this node, wake it, and return its actor; None if the node has none that is ready."""
        with self._lock:
            standby = self._ready.pop(node_id, None)
        if standby is None:
            return None
        standby.wake()
        return standby.actor

    def close(self, *, without_ray: bool = False) -> None:
        """End all standbys. Idempotent. `without_ray`: only those on this node, because Ray is gone."""
        with self._lock:
            self._is_closed = True
            self._cancelled.set()
            ready = [*self._ready.values(), *self._starting.values()]
            self._ready, self._starting = {}, {}
        for standby in ready:
            if without_ray:
                standby.abandon()
            else:
                standby.end()

    def _start_later(
        self, delay_s: float, cancelled: threading.Event, node_ids: Collection[str], own_node: str
    ) -> None:
        if not self._runtime.clock.wait(cancelled, delay_s):
            self._start(node_ids, own_node)

    def _start(self, node_ids: Collection[str], own_node: str) -> None:
        for standby in self._create(node_ids):
            try:
                pids = standby.wait_until_ready()
            except RayError as error:
                if self._give_back(standby):
                    text = "can't start a standby process on node %s, so replacing a rank there takes longer: %s"
                    logger.warning(text, standby.node_id[:8], describe_death(error))
                    standby.end()
                continue
            with self._lock:
                if self._starting.pop(standby.node_id, None) is None:
                    continue  # close() ended it
                if standby.node_id == own_node:
                    standby.rest(pids)
                self._ready[standby.node_id] = standby

    def _create(self, node_ids: Collection[str]) -> list[Standby]:
        """Create the standbys that these nodes lack. Ray may take long for that, if its control store is away."""
        with self._creating:
            with self._lock:
                there = {*self._ready, *self._starting}
                missing = [] if self._is_closed else [node_id for node_id in node_ids if node_id not in there]
            created = [self._make(node_id) for node_id in missing]
            with self._lock:
                if not self._is_closed:
                    self._starting |= {standby.node_id: standby for standby in created}
                    return created
        for standby in created:
            standby.end()
        return []

    def _give_back(self, standby: Standby) -> bool:
        """Remove a standby from those that are starting. Returns False if `close()` already removed it."""
        with self._lock:
            return self._starting.pop(standby.node_id, None) is not None

    def _make(self, node_id: str) -> Standby:
        return Standby(self._make_actor(node_id), node_id, self._runtime)
