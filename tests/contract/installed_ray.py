"""The installed Ray, by the names that scenarios use."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import get, get_actor, kill, nodes, remote, wait  # noqa: F401
from ray._private.state import actors, state
from ray.util import list_named_actors  # noqa: F401
from ray.util.placement_group import (  # noqa: F401
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raycore.node.processes import is_running  # noqa: F401

getpid, exit_process = os.getpid, os._exit
sleep, now_s, Event, Thread = time.sleep, time.monotonic, threading.Event, threading.Thread


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def on_node(node_id: str, *, soft: bool = False) -> Any:
    return NodeAffinitySchedulingStrategy(node_id, soft=soft)


def in_bundle(group: Any, index: int = 0) -> Any:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def own_actor_id() -> str:
    return ray.get_runtime_context().get_actor_id()


def own_node_id() -> str:
    return ray.get_runtime_context().get_node_id()


def state_of(actor: Any) -> str | None:
    """What the control store says of an actor."""
    return actors(actor._ray_actor_id.hex()).get("State")


def free_resources() -> dict[str, dict[str, float]]:
    return state.available_resources_per_node()


def draining_nodes() -> dict[str, int]:
    return state.get_draining_nodes()


current_thread = threading.current_thread


def peek(stream: Any) -> tuple[Any, bool]:
    """The ref of a stream's next item, and whether that is known."""
    return ray._private.worker.global_worker.core_worker.peek_object_ref_stream(stream._generator_ref)


def group_of_id(binary: bytes) -> Any:
    return PlacementGroup(ray.PlacementGroupID(binary))


# ---- a cluster of several nodes, which a program of its own starts

_the_cluster: list[Any] = []
_OPTIONS = {"object_store_memory": 80 << 20, "include_dashboard": False}
_SETTINGS: dict[str, Any] = {
    # else it starts a process for each CPU that is declared
    "prestart_worker_first_driver": False,
    # a node that doesn't answer is dead after some seconds
    "health_check_initial_delay_ms": 3000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


@contextmanager
def cluster(*, keeps_state: bool) -> Iterator[None]:
    """A cluster. `keeps_state`: whether its control store has its state in files, and can be restarted (Ray 2.60)."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as directory:
        if keeps_state:
            os.environ.update({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": directory})
        head = _OPTIONS | {"num_cpus": 16, "num_gpus": 4, "_system_config": _SETTINGS}
        _the_cluster.append(Cluster(initialize_head=True, head_node_args=head))
        ray.init(address=_the_cluster[0].address, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
        _the_cluster.pop().shutdown()


def add_node(cpus: int) -> str:
    return _the_cluster[0].add_node(num_cpus=cpus, **_OPTIONS).node_id


def _node(node_id: str) -> Any:
    return next(node for node in _the_cluster[0].worker_nodes if node.node_id == node_id)


def end_node(node_id: str) -> None:
    """End a node's own processes, as far as they haven't ended. Its workers notice.

    Returns when Ray knows, which takes some seconds: until then, it would put actors there.
    """
    node = _node(node_id)
    for each in node.all_processes["raylet"]:
        with suppress(ProcessLookupError):
            go_on(each.process.pid)
    _the_cluster[0].remove_node(node, allow_graceful=False)
    deadline_s = now_s() + 60
    while any(each["NodeID"] == node_id and each["Alive"] for each in nodes()):
        assert now_s() < deadline_s, "the node isn't declared dead"
        sleep(0.05)


def silence_node(node_id: str, pids: list[int]) -> None:
    """Have a node, and its workers `pids`, answer nothing, as if it had lost its network."""
    for pid in (*pids, _node(node_id).all_processes["raylet"][0].process.pid):
        stop(pid)


def end_raylet(node_id: str) -> None:
    end(_node(node_id).all_processes["raylet"][0].process.pid)


def drain(node_id: str, notice_s: float) -> None:
    """What an autoscaler does before it takes a node away."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = GcsClient(address=_the_cluster[0].gcs_address)
    deadline_ms = int((time.time() + notice_s) * 1000)
    accepted, why = client.drain_node(node_id, reason, "a test", deadline_ms)
    assert accepted, why


def _gcs_pid() -> int:
    return _the_cluster[0].head_node.all_processes["gcs_server"][0].process.pid


def stall_gcs() -> None:
    stop(_gcs_pid())


def resume_gcs() -> None:
    go_on(_gcs_pid())


def restart_gcs() -> None:
    head = _the_cluster[0].head_node
    head.kill_gcs_server()
    head.start_gcs_server()
