"""Ray's functions that raycore replaces while a local Ray starts, because `ray.init()` has no option for what they do.

Ray waits for a dashboard process even with `include_dashboard=False`, and starts an autoscaler, a dashboard agent and a
runtime environment agent. The four, with the modules that they make this process import, cost more than half of the CPU
seconds that Ray 2.60 takes to start. Most of that delays the first token. Without them, the local Ray has no metrics,
no state API and no usage reports, and the first use of a `runtime_env` takes a second longer.

A replacement is called with the function that it replaces, followed by that function's arguments. Its docstring says
why it exists and when it goes. If the installed Ray lacks a function, that function alone is not replaced.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any

import ray

from raycore.cluster.local_ray import idle_agent
from raycore.cluster.local_ray.own_processes import RayProcess
from raycore.ray_api import TOKEN_VARIABLE
from raycore.system import os, secrets

logger = logging.getLogger(__name__)

Replacements = dict[str, Callable[..., Any]]
"""Replacements by the full names of what they replace."""

_IDLE_AGENTS = {"dashboard_agent": idle_agent.DASHBOARD, "runtime_env_agent": idle_agent.RUNTIME_ENV}
"""The kind of idle agent that takes the place of Ray's, by Ray's name for it."""


def start_no_autoscaler(_start_monitor: object, _node: object) -> None:
    """Start no autoscaler.

    Why: a local Ray never gets another node, and the process costs CPU seconds of Ray's start.

    Goes when: `ray.init()` can set `RayParams.no_monitor`, as `ray start --no-monitor` does.
    """


def start_no_dashboard(_start_api_server: object, node: Any, **_: object) -> None:
    """Start no dashboard process.

    Why: with `include_dashboard=False`, Ray starts it for usage reports, and `ray.init()` waits until it serves.

    Goes when: `ray.init(include_dashboard=False)` starts no dashboard process, or doesn't wait for it.
    """
    node._webui_url = ""  # which Ray's own function would set


def import_no_dashboard(_get_dashboard_dependency_error: object) -> ImportError:
    """Say that the dashboard's modules can't be imported.

    Why: Ray imports them into this program to find out, with `include_dashboard=False`, too: 230 modules, 0.2 CPU
    seconds. All that depends on the answer is one flag of the dashboard agent, which doesn't run either.

    Goes when: `ray.init(include_dashboard=False)` no longer imports `ray.dashboard.optional_deps`.
    """
    return ImportError("a local Ray has no dashboard")


def command_of_idle_agent(python_command: Callable[..., list[str]], component: str, *args: Any, **options: Any) -> Any:
    """The beginning of the command of one of Ray's Python processes. Those of the agents start an `idle_agent`.

    Why: the raylet starts both agents and waits for them. They take four CPU seconds and hold 130 MB, for a dashboard
    that isn't there, and for a `runtime_env` that few programs use.

    Goes when: with `include_dashboard=False`, the raylet starts no dashboard agent, and starts the runtime environment
    agent when a `runtime_env` is first used. If only one of the two holds, that agent's part goes.
    """
    if component in _IDLE_AGENTS:  # Ray adds the agent's script and its arguments
        return [sys.executable, "-I", "-S", idle_agent.__file__, _IDLE_AGENTS[component]]
    return python_command(component, *args, **options)


def start_shielded(_console_popen: object, *args: Any, **options: Any) -> RayProcess:
    """Start one of Ray's processes as a `RayProcess`. See there for how.

    Why: Ray starts its processes in the program's process group. Terminals, `timeout` and service managers signal all
    of the group. That would end Ray while the program still drains its requests, and without Ray the program hangs for
    a minute. When the program is killed, Ray's agents and workers take up to a minute to notice.

    Goes when: `ray.init()` starts the raylet and the GCS in other sessions than the program's, with SIGTERM, SIGHUP and
    SIGINT blocked or ignored, and agents and workers end within a second of a raylet that was killed.
    `tests/ray/test_ending_by_signal.py` then passes without the replacement.
    """
    return RayProcess(*args, **options)


def save_token_if_possible(generate_and_save_token: Callable[[], None]) -> None:
    """Have a token for the new Ray: in the user's home, or else in this program's environment.

    Why: where there is no home that can be written to, as in many containers, Ray 2.59 and later fail without a token.
    Ray's processes inherit the environment, and `raycore status` reads the token from theirs.

    Goes when: `ray.init()` starts a local Ray in a process without a home.
    """
    try:
        generate_and_save_token()
    except (OSError, RuntimeError):  # a RuntimeError if the user has no home at all
        os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)


CLUSTER_PROCESSES: Replacements = {
    "ray._private.node.Node.start_monitor": start_no_autoscaler,
    "ray._private.node.Node.start_api_server": start_no_dashboard,
    "ray._private.utils.get_dashboard_dependency_error": import_no_dashboard,
    "ray._private.services._build_python_executable_command_memory_profileable": command_of_idle_agent,
}
"""What leaves out the processes that only clusters need."""

SHIELD: Replacements = {"ray._private.services.ConsolePopen": start_shielded} if sys.platform == "linux" else {}
"""What keeps the program's signals from Ray's processes, and ends them with the program."""


TOKEN: Replacements = {
    "ray._private.authentication.authentication_token_setup.generate_and_save_token": save_token_if_possible
}
"""What lets Ray start without a home directory."""


@contextmanager
def replaced(replacements: Replacements) -> Generator[None, None, None]:
    """While the block runs, each of these functions of Ray is replaced. Warns of those that the installed Ray lacks."""
    with ExitStack() as undo:
        for name, replacement in replacements.items():
            owner_name, _, attribute = name.rpartition(".")
            try:
                owner = resolve_name(owner_name)
                original = getattr(owner, attribute)
            except (ImportError, AttributeError):
                logger.warning(
                    "Ray %s has no %s, which raycore replaces while a local Ray starts, by %s. Ray does what it does "
                    "without the replacement.",
                    *(ray.__version__, name, replacement.__name__),
                )
            else:
                undo.callback(setattr, owner, attribute, original)
                setattr(owner, attribute, _in_place_of(original, replacement))
        yield


def _in_place_of(original: object, replacement: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:  # a function: as an attribute of a class it is a method
        return replacement(original, *args, **options)

    return call
