"""The functions of `ray`, for the process that calls them."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RaySystemError

from simulation.ray import groups
from simulation.ray.actors import ActorHandle
from simulation.ray.cluster import GCS_PORT
from simulation.ray.objects import ObjectRef, Stream, here
from simulation.ray.workers import Worker
from simulation.world import threads

SCRIPT_MODE, WORKER_MODE = 0, 1


def init(address: str | None = None, *, namespace: str = "", **_: Any) -> None:
    """Connect this process, as a driver, to the world's cluster."""
    cluster = threads.world().systems["ray"]
    thread = cluster.world.current
    if cluster.worker_of(thread.process) is not None:
        raise RuntimeError("Maybe you called ray.init twice by accident?")
    cluster.join(namespace)


def is_initialized() -> bool:
    cluster = threads.world().systems["ray"]
    return cluster.worker_of(cluster.world.current.process) is not None


def shutdown(wait_for_processes: bool = False) -> None:
    """Disconnect this process. What it has started ends."""
    cluster = threads.world().systems["ray"]
    cluster.disconnect(cluster.world.current.process)


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Returns before anything has happened."""
    worker = here()
    gcs, of = worker.cluster.gcs, actor._actor
    worker.cluster.world.tell(f"kills {of}")
    worker.cluster.send(worker, lambda: gcs.when_up(lambda: gcs.kill(of, no_restart=no_restart)))
    threads.pause()


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    worker = here()
    gcs = worker.cluster.gcs
    space = namespace if namespace is not None else worker.job.namespace
    found = gcs.ask("an actor by its name", lambda: gcs.holder(name, space)) if name else None
    if found is None:
        raise ValueError(
            f"Failed to look up actor with name '{name}'. This could because 1. You are trying to look up a named "
            "actor you didn't create. 2. The named actor died. 3. You did not use a namespace matching the namespace "
            "of the actor."
        )
    return ActorHandle(found, worker, is_counted=False)


def list_named_actors(all_namespaces: bool = False) -> list[str]:
    worker = here()
    gcs = worker.cluster.gcs
    space = worker.job.namespace
    return gcs.ask(
        "the names of actors",
        lambda: [
            actor.name
            for actor in gcs.actors.values()
            if actor.name and actor.namespace == space and actor.state != "DEAD"
        ],
    )


def nodes() -> list[dict[str, Any]]:
    cluster = here().cluster
    return cluster.gcs.ask("the nodes", lambda: [node.row() for node in cluster.nodes])


def put(value: Any) -> Any:
    raise NotImplementedError("the simulated Ray has no object store")


class RuntimeContext:
    """What a process knows of itself."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.worker = GlobalWorker()

    @property
    def _actor(self) -> Any:
        incarnation = self._worker.incarnation
        return None if incarnation is None else incarnation.actor

    @property
    def current_actor(self) -> ActorHandle:
        if self._actor is None:
            raise RuntimeError("This method is only available in an actor.")
        return ActorHandle(self._actor, self._worker, is_counted=False)

    def get_actor_id(self) -> str | None:
        return None if self._actor is None else self._actor.id

    def get_actor_name(self) -> str | None:
        return None if self._actor is None else self._actor.name

    def get_worker_id(self) -> str:
        return self._worker.id

    def get_job_id(self) -> str:
        return self._worker.job.id

    def get_node_id(self) -> str:
        return self._worker.node.id

    def get_assigned_resources(self) -> dict[str, float]:
        return {} if self._actor is None else dict(self._actor.amounts)

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        return {"GPU": []}

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        return False

    @property
    def gcs_address(self) -> str:
        return f"{self._worker.cluster.head.ip}:{GCS_PORT}"

    def get_temp_dir(self) -> str:
        return "/tmp/ray"

    def get_session_name(self) -> str:
        return "session"


def get_runtime_context() -> RuntimeContext:
    return RuntimeContext(here())


def get_node_ip_address() -> str:
    return here().node.ip


class _JobConfig:
    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}


class _CoreWorker:
    @staticmethod
    def get_job_config() -> _JobConfig:
        return _JobConfig()

    @staticmethod
    def peek_object_ref_stream(generator_ref: Stream) -> tuple[ObjectRef, bool]:
        return generator_ref.peek(here()), generator_ref.is_ready


class _OwnNode:
    @property
    def raylet_socket_name(self) -> str:
        return here().node.socket_path


class GlobalWorker:
    """`ray._private.worker.global_worker`."""

    core_worker = _CoreWorker()
    node = _OwnNode()

    @property
    def mode(self) -> int | None:
        try:
            return SCRIPT_MODE if here().incarnation is None else WORKER_MODE
        except RaySystemError:
            return None


class State:
    """`ray._private.state.state`."""

    @staticmethod
    def available_resources_per_node() -> dict[str, dict[str, float]]:
        cluster = here().cluster
        return cluster.gcs.ask(
            "free resources", lambda: {node.id: dict(node.shown) for node in cluster.nodes if node.is_alive}
        )

    @staticmethod
    def get_draining_nodes() -> dict[str, int]:
        cluster = here().cluster
        return cluster.gcs.ask(
            "draining nodes",
            lambda: {
                node.id: int(1000 * node.drain_deadline_s)
                for node in cluster.nodes
                if node.is_alive and node.is_shown_draining and node.drain_deadline_s is not None
            },
        )

    def _connect_and_get_accessor(self) -> State:
        return self

    @staticmethod
    def get_worker_info(worker_id: WorkerID) -> bytes | None:
        cluster = here().cluster

        def look() -> bytes | None:
            if any(worker.id == worker_id.hex for worker in cluster.workers.values()):
                return b"alive"
            return b"ended" if worker_id.hex in cluster.gcs.ended_workers else None

        return cluster.gcs.ask("a process", look)


class WorkerID:
    def __init__(self, hex_: str) -> None:
        self.hex = hex_

    from_hex = classmethod(lambda cls, text: cls(text))


class WorkerTableData:
    """As much of the message as is read."""

    def __init__(self, is_alive: bool) -> None:
        self.is_alive = is_alive

    @staticmethod
    def FromString(encoded: bytes) -> WorkerTableData:  # noqa: N802 - protobuf's name
        return WorkerTableData(encoded == b"alive")


def actors(actor_id: str) -> dict[str, Any]:
    """`ray._private.state.actors`."""
    gcs = here().cluster.gcs

    def look() -> dict[str, Any]:
        actor = gcs.actors.get(actor_id)
        return {} if actor is None else {"State": actor.state, "ActorClassName": actor.class_name}

    return gcs.ask("an actor's state", look)


class NodeAffinitySchedulingStrategy:
    def __init__(self, node_id: str, soft: bool = False) -> None:
        bytes.fromhex(node_id)
        self.node_id = node_id
        self.soft = soft


class PlacementGroupSchedulingStrategy:
    def __init__(self, placement_group: groups.PlacementGroup, placement_group_bundle_index: int = -1) -> None:
        self.placement_group = placement_group
        self.placement_group_bundle_index = placement_group_bundle_index
