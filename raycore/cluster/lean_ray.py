"""Starts a Ray for one program on one machine, without the processes that only clusters need.

`ray.init()` waits for a dashboard process even when it is told to include none, and starts an autoscaler. Together with
what their imports cost in this process and in Ray's agent they are 40 % of the 8 CPU seconds that Ray 2.60 takes to
start, most of it on the way to the first token. There is no option for it, so three of Ray's functions are replaced
while `ray.init()` runs, and two more so that its processes are apart from the program's signals (`own_processes`). What
is lost is what nobody asks of a local Ray: metrics, the state API, usage reports.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray._private import services, utils
from ray._private.node import Node

from raycore.cluster import own_processes

_ENVIRONMENT = {
    # workers compute: at Ray's default niceness of 15 anything else on the machine goes first
    "RAY_worker_niceness": "0",
    # else every process warns about what a later Ray will do with the device variables of actors without GPUs
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's node daemon connects to its own object store before that listens, and then sleeps this long: 1 s by default
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}

_OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a local Ray. Channels live in it, a few MiB for each worker; tensors never do."""

_SPARE_CPUS = 16
"""CPUs that are declared beyond the first engine's, for what else the program starts: they are only numbers."""


def start_lean_ray(num_cpus: int, **options: Any) -> None:
    """`ray.init()` a local Ray with `num_cpus` CPUs, and some to spare."""
    with _environment(_ENVIRONMENT), _without_cluster_processes(), _with_own_processes():
        ray.init(  # pyright: ignore[reportUnknownMemberType]  # its annotations have gaps
            address="local",
            num_cpus=num_cpus + max(_SPARE_CPUS, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            # processes start when actors need them, not one for each CPU that is declared
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )


@contextmanager
def _environment(values: dict[str, str]) -> Generator[None, None, None]:
    """Set variables that aren't set for as long as the block runs; processes started in it inherit them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _without_cluster_processes() -> Generator[None, None, None]:
    def start_monitor(node: Node) -> None:
        """No autoscaler."""

    def start_api_server(node: Any, **_: object) -> None:
        node._webui_url = ""

    def get_dashboard_dependency_error() -> ImportError:
        return ImportError("a local Ray has no dashboard")

    with (
        _replaced(Node, "start_monitor", start_monitor),
        _replaced(Node, "start_api_server", start_api_server),
        _replaced(utils, "get_dashboard_dependency_error", get_dashboard_dependency_error),
    ):
        yield


@contextmanager
def _with_own_processes() -> Generator[None, None, None]:
    with ExitStack() as stack:
        if own_processes.ARE_SUPPORTED:
            stack.enter_context(_replaced(services, "ConsolePopen", own_processes.OwnProcess))
            stack.enter_context(_replaced(Node, "start_raylet", own_processes.start_raylet_and_reaper))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Generator[None, None, None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
