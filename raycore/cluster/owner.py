"""Cleans up an engine that an actor or a task created, when that actor or task ends.

Ray removes placement groups when the job that created them ends. But an engine that an actor created ends earlier, with
the actor's process: Ray then ends the ranks, because that process owns them. The ranks' placement groups would keep
their CPUs and GPUs until the job ends. A `Reaper` removes these groups. The reaper is a detached actor, so it outlives
the process.

In three cases the owner ends but its process doesn't, so the engine is shut down in that process. After a task, Ray
reuses the process. After an actor's `__init__` has raised an error, Ray keeps the actor's instance, with its engine,
until nothing refers to the actors that the process created. An actor without references has ended, but its process
waits up to 5 s for the calls that it has made, among them the ranks' `run()`: it notices when the reaper has ended the
ranks.
"""

from __future__ import annotations

import logging
from typing import Any, cast
from weakref import finalize

from ray import _raylet
from ray._private.state import actors

from placement.reserve import groups_named, release
from placement.topology import read_cluster
from raycore.cluster.connection import end_engines
from raycore.node.processes import is_running
from raycore.ray_api import (
    actor_class,
    end_with_raylet,
    is_worker,
    is_worker_alive,
    kill,
    node_id,
    node_ip,
    on_node,
    own_actor,
    own_actor_id,
    own_actor_name,
    own_job,
    own_worker_id,
    title_process,
)
from raycore.status import EngineOwner
from raycore.system import os, threading, time

logger = logging.getLogger(__name__)

_REPLICA_PREFIX = "SERVE_REPLICA::"
"""Begins the names of Ray Serve's replicas. The application's name, the deployment's and the replica's id follow."""

_POLL_INTERVAL_S = 0.5
"""Interval, in seconds, between checks whether the owner, the process that created the engine, is alive."""


class Reaper:
    """Waits for a process to end, removes the placement groups that the process created for an engine, and ends itself.

    Ray restarts the reaper if it dies, on another node if necessary.
    """

    def __init__(self, name: str, node_id: str, pid: int, worker_id: str, actor_id: str | None, prefix: str) -> None:
        """Watch a process.

        Args:
            name: the reaper's name, for logs.
            node_id: the id of the node on which the process runs.
            pid: the process's id on that node.
            worker_id: Ray's id of the process.
            actor_id: the id of the actor that the process hosts; None if the process runs tasks.
            prefix: the placement groups whose names begin with `prefix` are removed.
        """
        self._name = name
        title_process(name)
        end_with_raylet()
        self._node_id = node_id
        self._pid = pid
        self._worker_id = worker_id
        self._actor_id = actor_id
        self._prefix = prefix
        threading.Thread(target=self._run, name="raycore-reaper", daemon=True).start()

    def __repr__(self) -> str:
        return self._name

    def _run(self) -> None:
        try:
            while self._process_runs() and not self._actor_is_dead():
                time.sleep(_POLL_INTERVAL_S)
            self._remove_groups()
            kill(own_actor())
        except Exception:  # end the process: Ray restarts the reaper, which tries again
            logger.exception("failed to watch process %d of node %s", self._pid, self._node_id)
            os._exit(1)

    def _remove_groups(self) -> None:
        is_gone = False
        while not is_gone:
            # Ray gives the process of an actor without references 5 s to end
            is_gone = not self._process_runs()
            release(groups_named(self._prefix))
            time.sleep(_POLL_INTERVAL_S)
        # the process may have created a group just before its end
        release(groups_named(self._prefix))

    def _process_runs(self) -> bool:
        return is_running(self._pid) if node_id() == self._node_id else process_runs(self._worker_id, self._node_id)

    def _actor_is_dead(self) -> bool:
        return self._actor_id is not None and _actor_state(self._actor_id) == "DEAD"


def process_runs(worker_id: str, node_id: str) -> bool:
    """Whether a process of the cluster runs, as far as Ray knows: by Ray's id of the process, and its node's.

    Ray learns of the process's end within milliseconds, but of no process's when a whole node ends.
    """
    return is_worker_alive(worker_id) and any(node.node_id == node_id and node.alive for node in read_cluster().nodes)


def _actor_state(actor_id: str) -> str | None:
    """An actor's state in Ray; None if Ray no longer knows the actor."""
    return cast("dict[str, str]", actors(actor_id)).get("State")


def _actor_class_name(actor_id: str) -> str:
    return cast("dict[str, str]", actors(actor_id)).get("ActorClassName", "")


REAPER = actor_class(Reaper, max_restarts=-1, num_cpus=0)
"""The Ray actor class."""


def start_reaper(name: str, prefix: str) -> Reaper | None:
    """Have the placement groups whose names begin with `prefix` removed when this process ends.

    Returns: the reaper, to be ended with `kill()` when no groups are left. None if this process is a job's driver,
    because Ray removes a driver's groups when the driver ends.
    """
    if not is_worker():
        return None
    own_node = node_id()
    return REAPER.options(
        lifetime="detached",
        # here the reaper sees the end of this process itself, and elsewhere what Ray says of it
        scheduling_strategy=on_node(own_node, soft=True),
    ).remote(name, own_node, os.getpid(), own_worker_id(), own_actor_id(), prefix)


def this_owner() -> EngineOwner:
    """What engines of this process belong to. Takes about a millisecond in an actor."""
    is_in_worker = is_worker()
    actor_id = own_actor_id() if is_in_worker else None
    kind, name = "task" if is_in_worker else "driver", ""
    if actor_id is not None:
        name = own_actor_name()
        kind = "replica" if name.startswith(_REPLICA_PREFIX) else "actor"
        name = name.removeprefix(_REPLICA_PREFIX) or f"{_actor_class_name(actor_id)} {actor_id[:8]}"
    return EngineOwner(kind, name, os.getpid(), node_id(), node_ip(), *own_job())


def end_with_owner(end: finalize[..., Any]) -> None:
    """Have `end` called when this process's task has ended, or when this process's actor has failed in `__init__`.

    Does nothing in a driver. If an actor ends in another way, `end` isn't called.
    """
    if not is_worker():
        return
    if own_actor_id() is None:
        args = _running_task_id(), end
        threading.Thread(target=_wait_for_task, args=args, name="raycore-task-watch", daemon=True).start()
    else:
        logging.getLogger("ray._raylet").addHandler(_CreationWatch(end))


def ended_with_owner() -> bool:
    """Whether this process's actor has ended for Ray, though its process still runs. If so, ends the actor's engines,
    on a thread. Takes about a millisecond in an actor."""
    actor_id = own_actor_id() if is_worker() else None
    if actor_id is None or _actor_state(actor_id) != "DEAD":
        return False
    threading.Thread(target=end_engines, name="raycore-owner-ended", daemon=True).start()
    return True


class _CreationWatch(logging.Handler):
    """Ends an engine when Ray logs that the `__init__` of this process's actor has raised an error.

    Ray shows this in no other way.
    """

    def __init__(self, end: finalize[..., Any]) -> None:
        super().__init__(logging.ERROR)
        self._end = end

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Exception raised in creation task"):
            self._end()


def _wait_for_task(task_id: object, end: finalize[..., Any]) -> None:
    while end.alive and _running_task_id() == task_id:
        time.sleep(_POLL_INTERVAL_S)
    end()


def _running_task_id() -> object:
    """The id of the task that this process runs; None if it runs none.

    Ray's public `get_task_id()` only sees the task of the calling thread.
    """
    return _raylet.current_task_id  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
