"""A process that is connected to Ray: what Ray's own threads do in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.world import kernel
from simulation.world.kernel import Process

if TYPE_CHECKING:
    from simulation.ray.actors import Actor, Incarnation
    from simulation.ray.calls import View
    from simulation.ray.cluster import Cluster
    from simulation.ray.nodes import Node


class Job:
    """A driver and all that it has started."""

    def __init__(self, id_: str, driver: Process, namespace: str) -> None:
        self.id = id_
        self.driver = driver
        self.namespace = namespace
        self.has_ended = False


class Worker:
    """A process that is connected to Ray."""

    def __init__(
        self, cluster: Cluster, process: Process, node: Node, job: Job, incarnation: Incarnation | None = None
    ) -> None:
        self.cluster = cluster
        self.process = process
        self.node = node
        self.job = job
        self.incarnation = incarnation
        """What runs in it. None: a driver."""
        self.id = cluster.new_id(28)
        self.ended_s: float | None = None
        self.is_known_dead = False
        """Whether Ray takes it for dead. It may run nevertheless."""
        self.views: dict[Actor, View] = {}
        self.owned: list[Actor] = []
        """The actors that it has started, and that haven't ended."""
        self._handles: dict[Actor, int] = {}
        self._callbacks: deque[Callable[[], object]] = deque()
        self._io: kernel.Thread | None = None
        process.on_end.append(self._end)

    @property
    def has_ended(self) -> bool:
        return self.process.has_ended

    def call_back(self, callback: Callable[[], object]) -> None:
        """Call `callback` on Ray's thread of this process."""
        if self.process.has_ended:
            return
        self._callbacks.append(callback)
        if self._io is None:
            self._io = self.cluster.world.start(self.process, "ray-io", self._run_callbacks)
        else:
            self.cluster.world.unpark(self._io)

    def _run_callbacks(self) -> None:
        while True:
            while self._callbacks:
                self._callbacks.popleft()()
            self.cluster.world.park("a callback of Ray")

    def view(self, actor: Actor) -> View:
        if actor not in self.views:
            from simulation.ray.calls import View

            self.views[actor] = View(self, actor)
        return self.views[actor]

    def hold(self, actor: Actor) -> None:
        """Count one more handle of an actor in this process."""
        self._handles[actor] = self._handles.get(actor, 0) + 1
        actor.hold()

    def drop(self, actor: Actor) -> None:
        if not self.process.has_ended:  # otherwise all of its handles were dropped
            self._handles[actor] -= 1
            actor.drop()

    def has_calls_under_way(self) -> bool:
        return any(view.in_flight or view.is_waiting for view in self.views.values())

    def _end(self, _: Any) -> None:
        self.ended_s = self.cluster.world.now_s
        for actor, count in self._handles.items():
            for _ in range(count):
                actor.drop()
        self._handles.clear()
        self.cluster.world.tell("ends", self.process)
        self.node.notice_end(self)
