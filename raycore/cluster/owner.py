"""What ends an engine's owner, where that isn't the program: an actor or a task.

Ray removes a placement group when the job that made it ends. An engine that an actor or a task has made goes earlier,
with the process, and so do its ranks, which Ray counts as that process's. Their groups would stay, with the CPUs and
GPUs in them, as long as the job runs. A `Reaper` removes them: an actor that belongs to nobody, so that it outlives the
process. A task may end without its process, which Ray uses again; then the engine is shut down there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, cast
from weakref import finalize

from ray import _raylet
from ray._private.state import actors

from placement.reserve import groups_named, release
from placement.topology import read_cluster
from raycore.node.processes import is_running
from raycore.ray_api import actor_class, is_worker, kill, node_id, on_node, own_actor, own_actor_id

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
"""How often it is looked whether the owner lives."""


class Reaper:
    """Waits for the end of one process, removes the placement groups that it made for an engine, and ends itself.

    Ray starts it again, elsewhere if need be, when it dies.
    """

    def __init__(self, name: str, node_id: str, pid: int, actor_id: str | None, prefix: str) -> None:
        """Watch over the process `pid` of a node. The names of its groups begin with `prefix`.

        Args:
            actor_id: of the actor whose process it is, if it is one's.
        """
        self._name = name
        self._node_id = node_id
        self._pid = pid
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
        except Exception:  # the thread's outermost frame: as a new process it tries again
            logger.exception("the watch over process %d of node %s failed", self._pid, self._node_id)
            os._exit(1)

    def _remove_groups(self) -> None:
        is_gone = False
        while not is_gone:
            # Ray leaves the process of an actor that nobody refers to any more 5 s to end
            is_gone = not self._process_runs()
            release(groups_named(self._prefix))
            time.sleep(_POLL_INTERVAL_S)
        # what it asked Ray for last is there by now
        release(groups_named(self._prefix))

    def _process_runs(self) -> bool:
        if node_id() == self._node_id:
            return is_running(self._pid)
        # it was started on the owner's node, so that node has failed
        return any(node.node_id == self._node_id and node.alive for node in read_cluster().nodes)

    def _actor_is_dead(self) -> bool:
        return self._actor_id is not None and _actor_state(self._actor_id) == "DEAD"


def _actor_state(actor_id: str) -> str | None:
    """What Ray says of an actor, None if it has forgotten it."""
    return cast("dict[str, str]", actors(actor_id)).get("State")


REAPER = actor_class(Reaper, max_restarts=-1, num_cpus=0)
"""What Ray starts."""


def start_reaper(name: str, prefix: str) -> Reaper | None:
    """Have the placement groups whose names begin with `prefix` removed when this process ends.

    Returns: the reaper, to be ended with `kill()` when nothing is left to remove; None in a job's own program, at
    whose end Ray removes them.
    """
    if not is_worker():
        return None
    own_node = node_id()
    return REAPER.options(
        lifetime="detached",
        # it sees the process there
        scheduling_strategy=on_node(own_node, soft=True),
    ).remote(name, own_node, os.getpid(), own_actor_id(), prefix)


def end_with_task(end: finalize[..., Any]) -> None:
    """Have `end` called when the task that this process runs is over. Does nothing outside of a task."""
    if is_worker() and own_actor_id() is None:
        args = _running_task_id(), end
        threading.Thread(target=_wait_for_task, args=args, name="raycore-task-watch", daemon=True).start()


def _wait_for_task(task_id: object, end: finalize[..., Any]) -> None:
    while end.alive and _running_task_id() == task_id:
        time.sleep(_POLL_INTERVAL_S)
    end()


def _running_task_id() -> object:
    """What the process runs, None when it waits for a task. The public `get_task_id()` answers for its own thread."""
    return _raylet.current_task_id  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
