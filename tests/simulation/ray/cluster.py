"""A simulated Ray cluster: what a scenario makes, and does harm to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ray.exceptions import RaySystemError

from simulation.ray.delays import Delays
from simulation.ray.gcs import Gcs
from simulation.ray.messages import Boundary, Message
from simulation.ray.nodes import Node
from simulation.ray.workers import Job, Worker
from simulation.world.kernel import Process, World
from simulation.world.sockets import Listener, listen
from simulation.world.system import run_exit_hooks

GCS_PORT = 6379


class Cluster:
    """A cluster in a world. Drivers connect to it by `ray.init`."""

    OUT_OF_MEMORY = -90
    """The exit code of a process that Ray's memory monitor has killed."""

    def __init__(self, world: World, *, share_of_late_values: float = 0.02) -> None:
        """`share_of_late_values`: of the items of streams, those whose values come later than the news of them."""
        self.world = world
        world.systems["ray"] = self
        self.draws = world.generator("Ray")
        self.delays = Delays(world.generator("the delays of Ray"))
        self.share_of_late_values = share_of_late_values
        self.nodes: list[Node] = []
        self.workers: dict[int, Worker] = {}
        """The processes that are connected and not known to be dead, by pid."""
        self._worker_of: dict[int, Worker] = {}
        self.on_boundary: Callable[[Boundary, Message], object] | None = None
        """Called at each boundary of each message: there a fault can strike."""
        self.raises: Callable[[Boundary, Message], Exception | None] | None = None
        """Asked when a process is about to call an actor or to record a metric, and when it hears an answer or an item:
        what it gets instead, if anything, of which no interface of Ray's speaks."""
        self.exports_metrics = False
        """Whether Ray exports what processes record: see `metrics`."""
        self.late_calls: dict[str, float] = {}
        """By how many seconds calls of a method are late at most. Half of them are not."""
        self.tells_messages = True
        """Whether messages are in the story."""
        self.environment: dict[str, str] = {}
        """Of the processes that Ray starts."""
        self.num_messages: Counter[str] = Counter()
        self.gcs = Gcs(self)

    def new_id(self, num_bytes: int) -> str:
        return self.draws.randbytes(num_bytes).hex()

    # ---- nodes

    def add_node(self, **amounts: float) -> Node:
        """A new node with these resources, such as `CPU=4`."""
        number = len(self.nodes)
        node = Node(self, f"n{number}", f"10.0.0.{number + 1}", amounts)
        self.nodes.append(node)
        if number == 0:
            listen(self.world.systems, (node.ip, GCS_PORT), Listener(lambda: self.gcs.process, lambda: node.is_lost))
        self.world.tell(f"joins with {amounts}", node)
        self.gcs.look()
        return node

    @property
    def head(self) -> Node:
        """The node on which drivers are, and the control store."""
        return self.nodes[0]

    def node_of(self, process: Process) -> Node | None:
        return next((node for node in self.nodes if process in node.processes), None)

    # ---- processes

    def join(self, namespace: str = "", node: Node | None = None) -> Worker:
        """Connect the process that runs as a driver."""
        thread = self.world.current
        assert thread is not None
        node = node or self.node_of(thread.process) or self.head
        if thread.process not in node.processes:
            node.host(thread.process)
        return self.connect(thread.process, node, Job(self.new_id(4), thread.process, namespace or self.new_id(16)))

    def drive(self, name: str, main: Callable[[], object], node: Node | None = None) -> Process:
        """Start a program on a node, whose process ends when `main` returns."""
        process = self.world.process(name, self.environment)
        (node or self.head).host(process)

        def run() -> None:
            main()
            run_exit_hooks()
            self.world.kill(process, 0)

        self.world.start(process, "main", run)
        return process

    def connect(self, process: Process, node: Node, job: Job, incarnation: Any = None) -> Worker:
        worker = self.workers[process.pid] = self._worker_of[process.pid] = Worker(
            self, process, node, job, incarnation
        )
        node.workers.append(worker)
        return worker

    def here(self) -> Worker:
        """The connection of the process that runs. Raises RaySystemError if it has none."""
        thread = self.world.current
        worker = None if thread is None else self.worker_of(thread.process)
        if worker is None:
            raise RaySystemError(f"{thread} uses Ray, to which its process isn't connected, or no longer")
        return worker

    def worker_of(self, process: Process) -> Worker | None:
        """The connection of a process, which may live on though Ray takes it for dead."""
        return self._worker_of.get(process.pid)

    def driver_of(self, process: Process) -> Process | None:
        """The driver whose job a process belongs to."""
        worker = self.worker_of(process)
        return None if worker is None else worker.job.driver

    def disconnect(self, process: Process) -> None:
        worker = self._worker_of.pop(process.pid, None)
        if worker is not None:
            self.world.tell("disconnects from Ray")
            worker.node.notice_disconnect(worker)

    @property
    def actor_processes(self) -> list[Process]:
        """All processes that run or ran actors."""
        return [worker.process for worker in self._worker_of.values() if worker.incarnation is not None]

    def kill_for_memory(self, process: Process) -> None:
        """End a process as Ray's memory monitor does."""
        self.world.tell("is killed for its memory", process)
        self.world.kill(process, self.OUT_OF_MEMORY)

    # ---- messages

    def pass_boundary(self, boundary: Boundary, message: Message) -> None:
        if self.on_boundary is not None:
            self.on_boundary(boundary, message)

    def raised_at(self, boundary: Boundary, message: Message) -> Exception | None:
        return None if self.raises is None else self.raises(boundary, message)

    def late_by_s(self, call: Message) -> float:
        """How much later a call comes than others."""
        most_s = self.late_calls.get(call.what)
        if most_s is None:
            return 0.0
        draws = self.world.systems.setdefault("late calls", self.world.generator("late calls"))
        return max(0.0, draws.uniform(-most_s, most_s))

    def send(self, worker: Worker, arrive: Callable[[], object]) -> None:
        """Have something arrive after a message's way, unless its sender ends before it was sent."""
        now_s, way_s = self.world.now_s, self.delays.network()
        flushed_s = now_s + min(way_s, self.delays.flush())

        def come() -> None:
            if worker.ended_s is None or worker.ended_s >= flushed_s:
                arrive()

        self.world.call_later(way_s, come)

    def tell_message(self, message: Message, receiver: str) -> None:
        self.num_messages[message.what] += 1
        if self.tells_messages:
            self.world.tell(f"{message.kind} {message.what} of {receiver}: {message.size} B")
