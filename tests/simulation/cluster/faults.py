"""What breaks in a scenario, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from simulation.cluster import deployments, kinds
from simulation.cluster.circumstances import raising
from simulation.cluster.deployments.servers import Server
from simulation.ray.cluster import Cluster
from simulation.ray.errors import Unexpected
from simulation.ray.messages import Boundary, Message
from simulation.scenario import AtMessage, AtShutdown, Fault, Moment
from simulation.world import kernel
from simulation.world.kernel import NEVER, Process

ENGINE, WORKER, CONTROL = "DPEngineCoreActor", "WorkerActor", "EngineControl"


class Faults:
    """The faults of a scenario."""

    def __init__(self, faults: Sequence[Fault], cluster: Cluster, servers: Sequence[Server]) -> None:
        self._cluster = cluster
        self._servers = servers
        self._timed = [fault for fault in faults if isinstance(fault.when, Moment)]
        self._raised = [fault for fault in faults if fault.kind == raising.KIND]
        self._at_messages = [
            fault for fault in faults if isinstance(fault.when, AtMessage) and fault not in self._raised
        ]
        self._at_shutdown = [fault for fault in faults if isinstance(fault.when, AtShutdown)]
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._num_calls: Counter[tuple[str, str]] = Counter()
        """Of those that can raise."""
        self._awaited: list[tuple[kernel.Thread, AtMessage, list[int]]] = []
        """Threads that wait for a message, and how often it has yet to come."""
        self.struck: list[tuple[float, Fault]] = []
        """Those that have struck, and when."""
        self.first_s = NEVER
        """When the first one has struck."""
        self.over_s = 0.0
        """When the last one of those that have struck is over."""
        self.cells: set[tuple[str, str, str]] = set()
        """(kind of request, kind of fault, boundary) of each request that ran when something broke."""

    def arm(self) -> None:
        """From now on, let things break as soon as all engines are up."""
        self._cluster.on_boundary = self._look
        self._cluster.world.systems["told of bytes"] = self._look_at_bytes
        if self._raised:
            self._cluster.raises = self._raised_at
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        if not self._is_up:
            self._cluster.world.call_later(0.01, self._wait_until_up)
            return
        for fault in self._timed:
            assert isinstance(fault.when, Moment)
            self._cluster.world.call_later(fault.when.at_s, lambda fault=fault: self._strike(fault, "any moment", None))

    def before_shutdown(self) -> float:
        """Let those strike that come then. Returns how many virtual seconds the shutdown has to wait."""
        waits_s = [0.0]
        for fault in self._at_shutdown:
            assert isinstance(fault.when, AtShutdown)
            waits_s.append(fault.when.wait_s)
            self._strike(fault, "any moment", None)
        self._at_shutdown = []
        return max(waits_s)

    def wait_for(self, when: AtMessage, timeout_s: float) -> None:
        """Have the current thread wait for a message, counted from now on, but no longer than `timeout_s`."""
        world = self._cluster.world
        assert world.current is not None
        awaited = world.current, when, [when.number]
        self._awaited.append(awaited)
        world.park(f"a message {when.method}", timeout_s)
        self._awaited.remove(awaited)

    def _look(self, boundary: Boundary, message: Message) -> None:
        for thread, when, left in self._awaited:
            if (when.method, when.boundary) == (message.what, boundary.value):
                left[0] -= 1
                if not left[0]:
                    self._cluster.world.unpark(thread)
        if not self._at_messages or not self._is_up:
            return
        key = (message.what, boundary.value)
        self._numbers[key] += 1
        for fault in list(self._at_messages):
            when = fault.when
            assert isinstance(when, AtMessage)
            if (when.method, when.boundary) == key and self._numbers[key] == when.number:
                self._at_messages.remove(fault)
                self._strike(fault, boundary.value, message)

    def _look_at_bytes(self, sender: Process, receiver: Process, size: int) -> None:
        """As `_look`, for what is sent over a socket."""
        self._look(Boundary.SENT, Message("bytes", "bytes", size, sender, receiver))

    def _raised_at(self, boundary: Boundary, message: Message) -> Exception | None:
        """What a process gets instead of a call or its answer."""
        if not self._is_up:
            return None
        key = (message.what, boundary.value)
        self._num_calls[key] += 1
        for fault in self._raised:
            when = fault.when
            assert isinstance(when, AtMessage)
            if (when.method, when.boundary) == key and self._num_calls[key] == when.number:
                self._note(fault, boundary.value)
                return Unexpected(f"there is no memory for {message.what}()")
        return None

    def _strike(self, fault: Fault, boundary: str, message: Message | None) -> None:
        if all(each.has_ended for each in self._drivers):
            return
        self._note(fault, boundary)
        if fault.kind in deployments.FAULTS:
            deployments.FAULTS[fault.kind](self._cluster, fault)
        else:
            KINDS[fault.kind](self, fault, message)

    def _note(self, fault: Fault, boundary: str) -> None:
        """Note that something breaks, and what runs then."""
        for recorder in [each.recorder for each in self._servers]:
            for record in recorder.records:
                if record.submitted_s is not None and record.ended_s is None:
                    for name in kinds.names_of(record.request, recorder.options):
                        self.cells.add((name, fault.kind, boundary))
        self._cluster.world.tell(f"{fault.kind} strikes", "fault")
        self.struck.append((self._cluster.world.now_s, fault))
        self.first_s = min(self.first_s, self._cluster.world.now_s)
        self.over_s = max(self.over_s, self._cluster.world.now_s + fault.for_s)

    @property
    def _is_up(self) -> bool:
        return all(each.recorder.is_up for each in self._servers)

    @property
    def driver(self) -> Process | None:
        """The process of the engine's program, or of the first one of several."""
        return self._servers[0].process

    @property
    def _drivers(self) -> list[Process]:
        """The processes that callers are in: of these, a fault that strikes any process spares all."""
        return [each.process for each in self._servers if each.process is not None]

    # ---- what breaks

    def _processes(self, class_name: str) -> list[Process]:
        """The processes of the actors of this class that live, in the order of their creation."""
        actors = [actor for actor in self._cluster.gcs.actors.values() if actor.class_name == class_name]
        return [
            actor.incarnation.process
            for actor in actors
            if actor.incarnation is not None and not actor.incarnation.process.has_ended
        ]

    def _target(self, fault: Fault, class_name: str) -> Process | None:
        processes = self._processes(class_name)
        return processes[fault.target % len(processes)] if processes else None

    def kill(self, fault: Fault, process: Process | None) -> None:
        if process is not None and process not in self._drivers:
            self._cluster.world.kill(process)

    def stop(self, fault: Fault, process: Process | None) -> None:
        world = self._cluster.world
        if process is not None and process not in self._drivers:
            world.call_later(fault.for_s, lambda: world.go_on(process))
            world.stop(process)  # a process that stops itself goes on from here, later

    def kill_engine(self, fault: Fault, _: Message | None) -> None:
        self.kill(fault, self._target(fault, ENGINE))

    def kill_worker(self, fault: Fault, _: Message | None) -> None:
        self.kill(fault, self._target(fault, WORKER))

    def kill_control(self, fault: Fault, _: Message | None) -> None:
        self.kill(fault, self._target(fault, CONTROL))

    def stop_engine(self, fault: Fault, _: Message | None) -> None:
        self.stop(fault, self._target(fault, ENGINE))

    def stop_worker(self, fault: Fault, _: Message | None) -> None:
        self.stop(fault, self._target(fault, WORKER))

    def out_of_memory(self, fault: Fault, _: Message | None) -> None:
        process = self._target(fault, ENGINE)
        if process is not None:
            self._cluster.kill_for_memory(process)

    def kill_sender(self, fault: Fault, message: Message | None) -> None:
        self.kill(fault, message and message.sender)

    def kill_receiver(self, fault: Fault, message: Message | None) -> None:
        self.kill(fault, message and message.receiver)

    def stop_sender(self, fault: Fault, message: Message | None) -> None:
        self.stop(fault, message and message.sender)

    def stop_receiver(self, fault: Fault, message: Message | None) -> None:
        self.stop(fault, message and message.receiver)

    def crash_node(self, fault: Fault, _: Message | None) -> None:
        node = self._other_node(fault)
        if node is not None:
            node.crash()

    def end_own_raylet(self, fault: Fault, _: Message | None) -> None:
        """Of the node on which the engine's program runs, which goes on."""
        driver = self.driver
        if driver is not None:
            node: Any = driver.machine
            self._cluster.world.kill(node.raylet)

    def lose_node(self, fault: Fault, _: Message | None) -> None:
        """It crashes, and comes back as another one after a while."""
        node = self._other_node(fault)
        if node is not None:
            node.crash()
            amounts = {name: amount for name, amount in node.total.items() if not name.startswith("node:")}
            self._cluster.world.call_later(fault.for_s, lambda: self._cluster.add_node(**amounts))

    def stand_still(self, fault: Fault, _: Message | None) -> None:
        node = self._other_node(fault)
        if node is not None:
            node.stand_still(fault.for_s)

    def drain_node(self, fault: Fault, _: Message | None) -> None:
        node = self._other_node(fault)
        if node is not None:
            node.drain(fault.for_s)

    def stall_gcs(self, fault: Fault, _: Message | None) -> None:
        self._cluster.gcs.stall(fault.for_s)

    def restart_gcs(self, fault: Fault, _: Message | None) -> None:
        self._cluster.gcs.restart(fault.for_s)

    def _other_node(self, fault: Fault) -> Any:
        """A node that isn't the driver's."""
        nodes = [node for node in self._cluster.nodes[1:] if node.is_alive and not node.is_lost]
        return nodes[fault.target % len(nodes)] if nodes else None


KINDS: dict[str, Callable[[Faults, Fault, Message | None], None]] = {
    "kill engine": Faults.kill_engine,
    "kill worker": Faults.kill_worker,
    "kill control": Faults.kill_control,
    "stop engine": Faults.stop_engine,
    "stop worker": Faults.stop_worker,
    "out of memory": Faults.out_of_memory,
    "kill sender": Faults.kill_sender,
    "kill receiver": Faults.kill_receiver,
    "stop sender": Faults.stop_sender,
    "stop receiver": Faults.stop_receiver,
    "crash node": Faults.crash_node,
    "lose node": Faults.lose_node,
    "end own raylet": Faults.end_own_raylet,
    "drain node": Faults.drain_node,
    "node stands still": Faults.stand_still,
    "stall gcs": Faults.stall_gcs,
    "restart gcs": Faults.restart_gcs,
}
