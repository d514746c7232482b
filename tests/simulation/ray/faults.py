"""What breaks in a cluster, and what has to be left afterwards: nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from simulation.ray.cluster import Cluster
from simulation.ray.messages import Boundary, Message
from simulation.world.kernel import Process
from simulation.world.system import time

Fault = Callable[[Cluster, Process, random.Random], object]


def kill(cluster: Cluster, process: Process, draws: random.Random) -> None:
    cluster.world.kill(process)


def kill_for_memory(cluster: Cluster, process: Process, draws: random.Random) -> None:
    cluster.kill_for_memory(process)


def kill_without_control_store(cluster: Cluster, process: Process, draws: random.Random) -> None:
    begin = draws.choice([cluster.gcs.stall, cluster.gcs.restart])
    begin(draws.uniform(0.1, 50.0))
    time.sleep(draws.uniform(0.0, 1.0))
    cluster.world.kill(process)


def lose_node(cluster: Cluster, process: Process, draws: random.Random) -> None:
    node: Any = process.machine
    if node is cluster.head:
        cluster.world.kill(process)
    else:
        node.crash()


def lose_raylet(cluster: Cluster, process: Process, draws: random.Random) -> None:
    node: Any = process.machine
    cluster.world.kill(process if node is cluster.head else node.raylet)


def drain_node(cluster: Cluster, process: Process, draws: random.Random) -> None:
    node: Any = process.machine
    if node is cluster.head:
        cluster.world.kill(process)
    else:
        node.drain(draws.uniform(0.5, 60.0))


def remove_group(cluster: Cluster, process: Process, draws: random.Random) -> None:
    actor = next(each for each in cluster.gcs.actors.values() if each.name == process.name)
    cluster.gcs.remove_group(actor.strategy.placement_group.id.hex())


def kill_successor(cluster: Cluster, process: Process, draws: random.Random) -> None:
    """Kill a rank, and a process that comes after it, at a boundary of one of its messages."""
    boundary = draws.choice([Boundary.RECEIVED, Boundary.ANSWERED, Boundary.HEARD])
    method = draws.choice(["wait_for_init", "run", "step_age_s", "load_progress"])

    def strike(at: Boundary, message: Message) -> None:
        if at is boundary and message.what == method and message.receiver is not None:
            cluster.on_boundary = None
            cluster.world.tell(f"is killed when {method} is {boundary.value}", message.receiver)
            cluster.world.kill(message.receiver)

    cluster.on_boundary = strike
    cluster.world.kill(process)


def kill_at_message(cluster: Cluster, process: Process, draws: random.Random) -> None:
    """Kill whoever is next at a boundary of a message of a kind that there has been: its sender, or its receiver."""
    boundary, method = draws.choice(list(Boundary)), draws.choice(sorted(cluster.num_messages))
    of_sender, count = draws.random() < 0.3, draws.choice([1, 1, 3, 10])
    driver = cluster.world.current.process if cluster.world.current is not None else None
    seen = 0

    def strike(at: Boundary, message: Message) -> None:
        nonlocal seen
        victim = message.sender if of_sender else message.receiver
        if at is not boundary or message.what != method or victim is None or victim is driver:
            return
        seen += 1
        if seen == count:
            cluster.on_boundary = None
            cluster.world.tell(f"is killed when {method} is {boundary.value}", victim)
            cluster.world.kill(victim)

    cluster.on_boundary = strike


FAULTS: dict[str, Fault] = {
    "whoever is at a message is killed": kill_at_message,
    "its process is killed": kill,
    "its process has no memory": kill_for_memory,
    "it is killed while the control store is away": kill_without_control_store,
    "its node crashes": lose_node,
    "its node's raylet ends": lose_raylet,
    "its node is drained": drain_node,
    "its group is removed": remove_group,
    "it is killed, and another one at a message": kill_successor,
}


def check_nothing_left(cluster: Cluster) -> None:
    """Fail if an engine that has ended has left an actor, a group, a process, a thread or resources."""
    assert not (left := [actor for actor in cluster.gcs.actors.values() if not actor.is_dead]), left
    assert not (held := [group for group in cluster.gcs.groups.values() if group.state != "REMOVED"]), held
    assert cluster.world.current is not None
    driver = cluster.world.current.process
    assert not (running := [process for process in cluster.actor_processes if not process.has_ended]), running
    threads = [thread.name for thread in driver.threads if not thread.is_over and thread.name != "ray-io"]
    assert threads == ["main"], threads
    used = {node.name: node.free for node in cluster.nodes if node.is_alive and node.free != node.total}
    assert not used, used
