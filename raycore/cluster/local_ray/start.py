"""Starts a local Ray quickly, and ends it completely."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

import ray

from raycore.cluster.local_ray.own_processes import wait_for_reapers
from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, SHIELD, TOKEN, replaced
from raycore.cluster.local_ray.room import check_room
from raycore.node.resources import usable_cores
from raycore.system import os, subprocess

PLAIN_VARIABLE = "RAYCORE_PLAIN_LOCAL_RAY"
"""If this environment variable is set to anything but 0, a local Ray starts as plain `ray.init()` starts it."""

_ENVIRONMENT = {
    # Ray's default niceness of 15 would let any other process on the machine run before the workers
    "RAY_worker_niceness": "0",
    # otherwise every process warns that a later Ray will set the device variables of actors without GPUs differently
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's node daemon tries to connect to its object store before the store listens. It sleeps before each retry, by
    # default for 1 s.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}

_OBJECT_STORE_BYTES = 256 << 20
"""Size of a local Ray's object store. It holds the channels, a few MiB for each worker, and no tensors."""

_END_TIMEOUT_S = 10.0
"""How long to wait for each of Ray's processes to end after it has been killed."""

_SPARE_CPUS = 16
"""Minimum number of logical CPUs declared in addition to those of the first engine, for the program's other actors and
tasks."""


def start_local_ray(num_cpus: int, **options: Any) -> None:
    """Start a local Ray with `num_cpus` logical CPUs and some spare ones. `options` are passed to `ray.init()`.

    With `RAYCORE_PLAIN_LOCAL_RAY=1`, Ray starts as plain `ray.init()` starts it, and has the machine's CPUs, or
    `num_cpus` if that is more.

    Raises:
        InitializationError: there is no room for what Ray writes.
        Exception: others of Ray's.
    """
    check_room()
    if os.environ.get(PLAIN_VARIABLE, "0") not in ("", "0"):
        with replaced(TOKEN):
            ray.init(address="local", num_cpus=num_cpus if num_cpus > usable_cores() else None, **options)
        return
    with _environment(_ENVIRONMENT), replaced(CLUSTER_PROCESSES | SHIELD | TOKEN):
        ray.init(
            address="local",
            num_cpus=num_cpus + max(_SPARE_CPUS, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            # start worker processes on demand instead of one for each declared CPU
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )


def end_local_ray() -> None:
    """Shut down the local Ray. No process of it is left when this returns."""
    if "wait_for_processes" in inspect.signature(ray.shutdown).parameters:
        ray.shutdown(wait_for_processes=True)
    else:  # Ray before 2.57 kills its processes, but doesn't wait for their end
        from ray._private import worker

        node = cast("Any", worker)._global_node
        killed = [info.process for infos in node.all_processes.values() for info in infos] if node is not None else []
        ray.shutdown()
        for process in killed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
    wait_for_reapers(_END_TIMEOUT_S)


@contextmanager
def _environment(values: dict[str, str]) -> Generator[None, None, None]:
    """While the block runs, set those environment variables that aren't set already. Ray's processes inherit them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
