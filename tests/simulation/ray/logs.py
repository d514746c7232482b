"""What processes of a simulated Ray have logged: each has said who it is. Ray keeps that in files on the node.

Those of this node are read there, and those of others are asked of Ray, which can't read them when a node has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.ray.nodes import Node
from simulation.world import threads
from simulation.world.kernel import Process

if TYPE_CHECKING:
    from simulation.ray.cluster import Cluster


def words_of(process: Process) -> str:
    """The last line that a process has logged."""
    return f"the last words of {process.name} ({process.pid})"


def read_log(logs_dir: Path, pid: int) -> list[str]:
    """Real: reads files of this node."""
    here = threads.world()
    assert here.current is not None
    return [words_of(each) for each in _found(here.systems["ray"], pid, here.current.process.machine)]


def get_log(*, node_id: str, pid: int, suffix: str, **_: Any) -> Iterator[str]:
    """`ray.util.state.get_log`."""
    cluster: Cluster = threads.world().systems["ray"]
    node = next(each for each in cluster.nodes if each.id == node_id)
    if not (cluster.gcs.is_up and node.is_alive and node.answers) or node.raylet.has_ended:
        raise ConnectionError(f"the agent of {node} can't be reached")
    for process in _found(cluster, pid, node) if suffix == "err" else ():
        yield f":actor_name:{process.name}\n{words_of(process)}\n"


def was_reachable(cluster: Cluster, node: Node) -> bool:
    """Whether Ray could read what there is on a node all the time."""
    return not cluster.gcs.num_outages and not node.stands_still_until_s and not (node.is_lost or node.raylet.has_ended)


def _found(cluster: Cluster, pid: int, machine: object) -> list[Process]:
    return [each for each in cluster.actor_processes if each.pid == pid and each.machine is machine]
