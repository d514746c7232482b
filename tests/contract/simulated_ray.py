"""The simulated Ray, by the names that scenarios use."""

from __future__ import annotations

import signal
from typing import Any

from simulation.ray import actors, api, groups, objects
from simulation.ray.host import is_running  # noqa: F401
from simulation.world import system
from simulation.world.threads import Event, Thread, world  # noqa: F401

get, wait = objects.get, objects.wait
get_actor, kill, nodes, remote = api.get_actor, api.kill, api.nodes, actors.remote
list_named_actors = api.list_named_actors
placement_group, placement_group_table = groups.placement_group, groups.placement_group_table
remove_placement_group = groups.remove_placement_group

getpid, exit_process = system.os.getpid, system.os._exit
sleep, now_s = system.time.sleep, system.time.monotonic


def end(pid: int) -> None:
    system.os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    system.os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    system.os.kill(pid, signal.SIGCONT)


def on_node(node_id: str, *, soft: bool = False) -> Any:
    return api.NodeAffinitySchedulingStrategy(node_id, soft=soft)


def in_bundle(group: Any, index: int = 0) -> Any:
    return api.PlacementGroupSchedulingStrategy(group, index)


def own_actor_id() -> str | None:
    return api.get_runtime_context().get_actor_id()


def own_node_id() -> str:
    return api.get_runtime_context().get_node_id()


def state_of(actor: Any) -> str | None:
    return api.actors(actor._actor.id).get("State")


free_resources = api.State.available_resources_per_node
draining_nodes = api.State.get_draining_nodes
current_thread = system.module().threading.current_thread


def peek(stream: Any) -> tuple[Any, bool]:
    return api.GlobalWorker.core_worker.peek_object_ref_stream(stream._generator_ref)


def group_of_id(binary: bytes) -> Any:
    return groups.PlacementGroup(groups.PlacementGroupID(binary))


# ---- several nodes


def _cluster() -> Any:
    return world().systems["ray"]


def _node(node_id: str) -> Any:
    return next(node for node in _cluster().nodes if node.id == node_id)


def add_node(cpus: int) -> str:
    node = _cluster().add_node(CPU=cpus)
    return node.id


def end_node(node_id: str) -> None:
    _node(node_id).crash()


def silence_node(node_id: str, pids: list[int]) -> None:
    _node(node_id).crash()


def end_raylet(node_id: str) -> None:
    world().kill(_node(node_id).raylet)


def drain(node_id: str, notice_s: float) -> None:
    _node(node_id).drain(notice_s)


def stall_gcs() -> None:
    _cluster().gcs.stall(50.0)


def resume_gcs() -> None:
    _cluster().gcs.resume()


def restart_gcs() -> None:
    _cluster().gcs.restart(3.0)
    sleep(4.0)


# ---- what only this one can be made to do


def kill_for_memory(pid: int) -> None:
    _cluster().kill_for_memory(system.find_process(pid))


def leave(actor: Any) -> None:
    """Have an actor's process end when its calls have ended."""
    _cluster().gcs.actors[actor._actor.id].incarnation.leave()
