"""Ray's own exceptions, with the texts that Ray gives them. Each caller gets an exception of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    UnserializableException,
)

from simulation.ray.messages import Packed

if TYPE_CHECKING:
    from simulation.ray.actors import Actor

Error = Callable[[], Exception]
"""Makes an exception."""


class Unexpected(MemoryError):
    """What a call raises of which no interface of Ray's speaks."""


PROCESS_DIED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error."
)
KILLED = "The actor is dead because it was killed by `ray.kill`."
OUT_OF_SCOPE = "The actor is dead because all references to the actor were removed."
GROUP_REMOVED = "The actor is dead because its placement group was removed."
JOB_ENDED = "The actor is dead because its job has finished."


def node_died(node_id: str) -> str:
    return f"The actor died because its node has died. Node Id: {node_id}\nthe actor's node was terminated unexpectedly"


def owner_died(worker_id: str, ip: str, detail: str) -> str:
    return (
        f"The actor is dead because its owner has died. Owner Id: {worker_id} Owner Ip address: {ip} "
        f"Owner worker exit type: SYSTEM_ERROR Worker exit detail: {detail}"
    )


def died(actor: Actor, text: str, *, preempted: bool = False) -> Error:
    """An ActorDiedError. `text`: why."""
    start = actor.incarnation
    told: dict[str, Any] = {"pid": start.process.pid} if start is not None else {"never_started": True}
    if start is not None:
        told["node_ip_address"] = start.node.ip
    if preempted:
        told["node_death_info"] = NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED)
    context = ActorDiedErrorContext(
        class_name=actor.class_name,
        actor_id=bytes.fromhex(actor.id),
        name=actor.name,
        ray_namespace=actor.namespace,
        error_message=text,
        **told,
    )
    # by its name, as Ray does it: it can be pickled then
    return lambda: ActorDiedError(cause=context)


def failed_in_init(raised: Error) -> Error:
    def make() -> RayError:
        error = raised()
        assert isinstance(error, RayTaskError)
        return ActorDiedError(error)

    return make


def unavailable(actor: Actor) -> Error:
    said = "The actor's connection broke, and the control store hasn't said why: RpcError: rpc_code: 14"
    return lambda: ActorUnavailableError(said, bytes.fromhex(actor.id))


def restarting(actor: Actor) -> Error:
    said = "The actor is temporarily unavailable: IOError: The actor is restarting."
    return lambda: ActorUnavailableError(said, bytes.fromhex(actor.id))


def unschedulable(node_id: str) -> Error:
    said = f"The actor is not schedulable: the node specified via NodeAffinitySchedulingStrategy doesn't exist any more or is infeasible, and soft=False was specified. Node Id: {node_id}"  # noqa: E501
    return lambda: ActorUnschedulableError(said)


def without_group() -> Error:
    """Of an actor that hadn't been created when its group was removed."""
    said = "Could not create the actor because its associated placement group was removed."
    return lambda: ActorUnschedulableError(said)


def out_of_memory(node_id: str) -> Error:
    said = f"Task was killed due to the node running low on memory. Node Id: {node_id}. 1 worker(s) were killed."
    return lambda: OutOfMemoryError(said)


def cancelled(actor: Actor) -> Error:
    said = f"The task is canceled from an actor {actor.id} before it executes."
    return lambda: TaskCancelledError(error_message=said)


def raised(error: BaseException, function: str, title: str, pid: int, ip: str, actor_id: str) -> Error:
    """A RayTaskError around what a method has raised, as it comes out of its process."""
    trace = "".join(traceback.format_exception(error))
    cause = error.cause if isinstance(error, RayTaskError) else error  # pyright: ignore[reportUnknownMemberType]
    packed = Packed(RayTaskError(function, trace, cause, title, pid, ip, actor_id=actor_id))

    def unpack() -> RayError:
        try:
            return packed.unpack()
        except Exception:
            return UnserializableException(trace)

    return unpack
