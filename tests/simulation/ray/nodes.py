"""The machines of a simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simulation.ray import errors
from simulation.ray.delays import UNNOTICED_S
from simulation.world.kernel import Process
from simulation.world.sockets import Listener, listen

if TYPE_CHECKING:
    from simulation.ray.cluster import Cluster
    from simulation.ray.groups import Group
    from simulation.ray.workers import Worker

Amounts = dict[str, float]


class Pool:
    """Amounts of resources of which parts are taken: a node's, or a bundle's."""

    def __init__(self, total: Mapping[str, float]) -> None:
        self.total = {name: float(amount) for name, amount in total.items()}
        self.free = dict(self.total)

    def fits(self, amounts: Mapping[str, float]) -> bool:
        return all(self.free.get(name, 0.0) >= amount for name, amount in amounts.items() if amount > 0)

    def take(self, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            self.free[name] = self.free.get(name, 0.0) - amount

    def give_back(self, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            self.free[name] = self.free.get(name, 0.0) + amount


class Node(Pool):
    """A machine with a raylet, Ray's daemon."""

    def __init__(self, cluster: Cluster, name: str, ip: str, total: Mapping[str, float]) -> None:
        super().__init__({**total, f"node:{ip}": 1.0})
        self.cluster = cluster
        self.name = name
        self.ip = ip
        self.port = 6800
        self.id = cluster.new_id(28)
        self.raylet = cluster.world.process(f"raylet of {name}")
        self.raylet.machine = self
        self.raylet.on_end.append(self._raylet_ended)
        for address in ((ip, self.port), self.socket_path):
            listen(cluster.world.systems, address, Listener(lambda: self.raylet, lambda: not self.answers))
        self.workers: list[Worker] = []
        self.processes: list[Process] = []
        """All processes on it, those without Ray, too."""
        self.ends_with_raylet: list[Process] = []
        self.is_lost = False
        """Whether it has crashed. Nobody hears from it any more."""
        self.stands_still_until_s = 0.0
        """Until then, nothing runs on it, and nobody hears from it."""
        self.is_alive = True
        """Whether Ray takes it for alive."""
        self._has_said_goodbye = False
        """Whether its raylet has told that it ends."""
        self.drain_deadline_s: float | None = None
        self.is_shown_draining = False
        self.groups: list[tuple[Group, int]] = []
        """The bundles on it, as (group, index)."""
        self.shown = self._present()

    def __repr__(self) -> str:
        return self.name

    @property
    def socket_path(self) -> str:
        return f"/tmp/ray/{self.name}/raylet"

    @property
    def takes_actors(self) -> bool:
        """Whether Ray sends new actors and groups to it: to a crashed one, too, until it knows."""
        return self.is_alive and self.drain_deadline_s is None

    @property
    def answers(self) -> bool:
        return not self.is_lost and self.cluster.world.now_s >= self.stands_still_until_s

    def host(self, process: Process) -> None:
        """Have a process run on this machine."""
        process.machine = self
        self.processes.append(process)

    # ---- resources

    def changed(self, *, released: bool) -> None:
        """Show the present amounts to others, later."""
        delays = self.cluster.delays
        self.cluster.world.call_later(delays.resources_shown() if released else delays.network(), self._show)
        if released:
            self.cluster.gcs.look()
            self._look_for_work()

    def _show(self) -> None:
        if not self.is_lost:
            self.shown = self._present()

    def _present(self) -> Amounts:
        amounts = dict(self.free)
        for group, index in self.groups:
            pool = group.pools[index]
            for name, amount in pool.free.items():
                amounts[f"{name}_group_{index}_{group.id}"] = amount
                whole = f"{name}_group_{group.id}"
                amounts[whole] = amounts.get(whole, 0.0) + amount
        return {name: amount for name, amount in amounts.items() if amount > 0}

    # ---- ends

    def crash(self) -> None:
        """End at once, with all processes. Ray notices after a long time."""
        if self.is_lost:
            return
        self.is_lost = True
        self.cluster.world.tell("crashes", self)
        for process in (*self.processes, self.raylet):
            self.cluster.world.kill(process)
        self.cluster.gcs.later(self.cluster.delays.unnoticed(), self._declare_dead)

    def stand_still(self, seconds: float) -> None:
        """Run nothing for a while, as a machine that is moved. It is back before Ray notices anything."""
        assert seconds < UNNOTICED_S[0]
        world = self.cluster.world
        if self.is_lost or not self.answers:
            return
        world.tell(f"stands still for {seconds:g} s", self)
        self.stands_still_until_s = world.now_s + seconds
        stopped = [each for each in (*self.processes, self.raylet) if not (each.is_stopped or each.has_ended)]
        for process in stopped:
            world.stop(process)

        def go_on() -> None:
            world.tell("goes on", self)
            for process in stopped:
                if not process.has_ended:
                    world.go_on(process)

        world.call_later(seconds, go_on)

    def drain(self, notice_s: float) -> None:
        """Tell that it ends after `notice_s` seconds, and end then."""
        world, delays = self.cluster.world, self.cluster.delays
        world.tell(f"is drained, and ends in {notice_s:g} s", self)
        self.drain_deadline_s = world.now_s + notice_s

        def show() -> None:
            self.is_shown_draining = True

        self.cluster.gcs.later(delays.notice(), show)
        self._look_for_work()
        world.call_later(notice_s, self._end_drained)

    def _look_for_work(self) -> None:
        """The raylet of a node that is drained ends as soon as nothing uses the node."""
        if self.drain_deadline_s is not None and self._is_idle:
            self.cluster.world.call_later(self.cluster.delays.notice(), self._end_idle)

    def _end_idle(self) -> None:
        if self._is_idle and not self.is_lost:
            self._has_said_goodbye = True
            self.cluster.world.kill(self.raylet)

    @property
    def _is_idle(self) -> bool:
        return not self.workers and self.free == self.total

    def _end_drained(self) -> None:
        if not self.is_lost:
            self.cluster.world.tell("ends after its drain", self)
            self.is_lost = True
            for process in (*self.processes, self.raylet):
                self.cluster.world.kill(process)
            self.cluster.gcs.later(self.cluster.delays.notice(), self._declare_dead)

    def _raylet_ended(self, _: Process) -> None:
        """Ray takes the end of the raylet for the end of the node, as late as if the node had crashed.

        Most of its processes notice soon. Some live on for a while.
        """
        if self.is_lost:
            return
        world = self.cluster.world
        world.tell("loses its raylet", self)
        for process in self.ends_with_raylet:
            world.kill(process)
        for worker in self.workers:
            if worker.incarnation is not None:
                world.call_later(self.cluster.delays.without_raylet(), lambda w=worker: world.kill(w.process, 1))
        delays = self.cluster.delays
        self.cluster.gcs.later(delays.notice() if self._has_said_goodbye else delays.unnoticed(), self._declare_dead)

    def _declare_dead(self) -> None:
        self.is_alive = False
        self.cluster.world.tell("is declared dead", self)
        self.cluster.gcs.node_died(self)

    def notice_end(self, worker: Worker) -> None:
        """A process on it has ended: its raylet tells the control store, if it can."""
        if worker in self.workers:
            self.workers.remove(worker)
        if worker.process in self.processes:
            self.processes.remove(worker.process)
        if not self.is_lost and not self.raylet.has_ended:
            self.cluster.gcs.later(self.cluster.delays.notice(), lambda: self.cluster.gcs.worker_ended(worker))
            self._look_for_work()

    def notice_disconnect(self, worker: Worker) -> None:
        """A process has said that it no longer uses Ray."""
        self.workers.remove(worker)
        self.cluster.gcs.later(self.cluster.delays.network(), lambda: self.cluster.gcs.worker_ended(worker))

    def death_text(self) -> str:
        return errors.node_died(self.id)

    def row(self) -> dict[str, Any]:
        """As `ray.nodes()` lists it."""
        return {
            "NodeID": self.id,
            "Alive": self.is_alive,
            "NodeManagerAddress": self.ip,
            "NodeManagerHostname": self.name,
            "NodeManagerPort": self.port,
            "MetricsExportPort": 8080 if self.cluster.exports_metrics else 0,
            "Resources": dict(self.total) if self.is_alive else {},
        }
