"""Starts a local Ray without the processes that only clusters need.

`ray.init()` waits for a dashboard process even with `include_dashboard=False`, and starts an autoscaler, a dashboard
agent and a runtime environment agent. The four, with the modules that they make this process import, cost more than
half of the CPU seconds that Ray 2.60 takes to start. Most of that delays the first token. Ray has no option to leave
them out, so four of Ray's functions are replaced while `ray.init()` runs. As a result, the local Ray has no metrics, no
state API and no usage reports, and the first use of a `runtime_env` takes a second longer.

Two more functions are replaced to keep the program's signals from Ray's processes: see `own_processes`.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import ray
from ray._private import services, utils, worker
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT

from raycore.cluster import idle_agent, own_processes

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

_PYTHON_COMMAND = "_build_python_executable_command_memory_profileable"
"""Ray's function that begins the commands of its own Python processes, by the kind of process."""

_IDLE_AGENTS = {
    PROCESS_TYPE_DASHBOARD_AGENT: idle_agent.DASHBOARD,
    PROCESS_TYPE_RUNTIME_ENV_AGENT: idle_agent.RUNTIME_ENV,
}

_OBJECT_STORE_BYTES = 256 << 20
"""Size of a local Ray's object store. It holds the channels, a few MiB for each worker, and no tensors."""

_END_TIMEOUT_S = 10.0
"""How long to wait for each of Ray's processes to end after it has been killed."""

_SPARE_CPUS = 16
"""Minimum number of logical CPUs declared in addition to those of the first engine, for the program's other actors and
tasks."""


def start_lean_ray(num_cpus: int, **options: Any) -> None:
    """Start a local Ray with `num_cpus` logical CPUs and some spare ones. `options` are passed to `ray.init()`."""
    with _environment(_ENVIRONMENT), without_cluster_processes(), _with_own_processes():
        ray.init(
            address="local",
            num_cpus=num_cpus + max(_SPARE_CPUS, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            # start worker processes on demand instead of one for each declared CPU
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )


def end_lean_ray() -> None:
    """Shut down the local Ray. No process of it is left when this returns."""
    if "wait_for_processes" in inspect.signature(ray.shutdown).parameters:
        ray.shutdown(wait_for_processes=True)
        return
    # Ray before 2.57 kills its processes, but doesn't wait for their end
    node = cast("Any", worker)._global_node
    processes = [info.process for infos in node.all_processes.values() for info in infos] if node is not None else []
    ray.shutdown()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)


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


@contextmanager
def without_cluster_processes() -> Generator[None, None, None]:
    """Nodes that this process starts while the block runs have no dashboard, no autoscaler, and idle agents."""

    def start_monitor(node: Node) -> None:
        """Start no autoscaler."""

    def start_api_server(node: Any, **_: object) -> None:
        node._webui_url = ""

    def get_dashboard_dependency_error() -> ImportError:
        return ImportError("a local Ray has no dashboard")

    python_command: Callable[..., list[str]] = getattr(services, _PYTHON_COMMAND)

    def python_command_with_idle_agents(component: str, *args: Any, **options: Any) -> list[str]:
        if component in _IDLE_AGENTS:  # Ray adds the agent's script and its arguments
            return [sys.executable, "-I", "-S", idle_agent.__file__, _IDLE_AGENTS[component]]
        return python_command(component, *args, **options)

    with (
        _replaced(Node, "start_monitor", start_monitor),
        _replaced(Node, "start_api_server", start_api_server),
        _replaced(utils, "get_dashboard_dependency_error", get_dashboard_dependency_error),
        _replaced(services, _PYTHON_COMMAND, python_command_with_idle_agents),
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
