"""Puts the simulated Ray into the place of Ray's modules."""

from __future__ import annotations

import atexit
import logging
import sys
import types
from typing import Any

import cloudpickle
import ray as real
import ray.exceptions as exceptions

from simulation.ray import actors, api, groups, logs, metrics, objects
from simulation.world import threads
from simulation.world.system import NAME as SYSTEM
from simulation.world.system import Unsimulated

_KEPT = ("ray.exceptions", "ray.core")
"""Modules of Ray's that stay: its exceptions, whose texts raycore reads, and the messages in them."""


def _unused(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the simulated Ray has no {what}")

    return refuse


def _client() -> Any:
    return types.SimpleNamespace(is_connected=lambda: False)


def tree() -> dict[str, dict[str, Any]]:
    """The names in each module."""
    state = api.State()
    global_worker = api.GlobalWorker()
    return {
        "ray": {
            "__version__": real.__version__,
            "remote": actors.remote,
            "method": actors.method,
            "get": objects.get,
            "wait": objects.wait,
            "kill": api.kill,
            "get_actor": api.get_actor,
            "init": api.init,
            "shutdown": api.shutdown,
            "is_initialized": api.is_initialized,
            "nodes": api.nodes,
            "put": api.put,
            "get_runtime_context": api.get_runtime_context,
            "ObjectRef": objects.ObjectRef,
            "PlacementGroupID": groups.PlacementGroupID,
            "WorkerID": api.WorkerID,
            "WORKER_MODE": api.WORKER_MODE,
        },
        "ray.cloudpickle": {
            "dumps": cloudpickle.dumps,
            "loads": cloudpickle.loads,
            "register_pickle_by_value": cloudpickle.register_pickle_by_value,
        },
        "ray.util": {
            "list_named_actors": api.list_named_actors,
            "get_node_ip_address": api.get_node_ip_address,
            "get_current_placement_group": groups.current_placement_group,
        },
        "ray.util.placement_group": {
            "PlacementGroup": groups.PlacementGroup,
            "placement_group": groups.placement_group,
            "placement_group_table": groups.placement_group_table,
            "remove_placement_group": groups.remove_placement_group,
        },
        "ray.util.scheduling_strategies": {
            "NodeAffinitySchedulingStrategy": api.NodeAffinitySchedulingStrategy,
            "PlacementGroupSchedulingStrategy": api.PlacementGroupSchedulingStrategy,
        },
        "ray.util.metrics": {"Counter": metrics.Counter, "Gauge": metrics.Gauge, "Histogram": _unused("histograms")},
        "ray.util.client": {"ray": _client()},
        "ray.util.state": {"get_log": logs.get_log},
        "ray._private": {},
        "ray._private.worker": {"global_worker": global_worker, "blocking_get_inside_async_warned": False},
        "ray._private.state": {
            "state": state,
            "actors": api.actors,
            "gcs_pb2": types.SimpleNamespace(WorkerTableData=api.WorkerTableData),
        },
        "ray._private.auto_init_hook": {"enable_auto_connect": True},
        "ray._private.utils": {"read_ray_address": lambda: "", "get_ray_address_file": _unused("address file")},
        "ray._raylet": {
            "setproctitle": lambda title: None,
            "getproctitle": lambda: "ray::simulated",
            "current_task_id": None,
            "RawSerializedObject": _unused("channels"),
        },
        "ray.experimental": {},
        "ray.experimental.channel": {},
        "ray.experimental.channel.shared_memory_channel": {"Channel": _unused("channels")},
        "ray.experimental.channel.utils": {"get_self_actor": _unused("channels")},
    }


class _LoggerOfProcesses(logging.Logger):
    """A logger of which each simulated process has its own handlers."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's name
        thread = threads.world().current
        assert thread is not None
        thread.process.log_handlers.append((self.name, hdlr))

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        thread = threads.world().current
        for name, handler in [] if thread is None else list(thread.process.log_handlers):
            if name == self.name and record.levelno >= handler.level:
                handler.handle(record)


def install() -> None:
    """Put the simulated Ray in Ray's place. To be called before anything of raycore is imported."""
    mine = [name for name in sys.modules if name.partition(".")[0] in ("raycore", "placement") and name != SYSTEM]
    assert not mine, f"{mine[0]} was imported"
    atexit.unregister(real.shutdown)
    for name in list(sys.modules):
        if name.partition(".")[0] == "ray" and not name.startswith(_KEPT):
            del sys.modules[name]
    for name, values in tree().items():
        made = Unsimulated(name)
        made.__path__ = []
        made.__dict__.update(values)
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
    sys.modules["ray"].exceptions = exceptions  # pyright: ignore[reportAttributeAccessIssue]
    logging.Logger.manager.loggerDict["ray._raylet"] = _LoggerOfProcesses("ray._raylet")
