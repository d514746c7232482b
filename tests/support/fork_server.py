"""Starts processes as forks of a process that has imported what they need.

Ray starts a Python process for each worker. Ours then import Ray and torch: 2 to 5 CPU seconds each, most of what the
tests that need a cluster took. Here the raylet starts `forked_worker.py` instead, which needs neither: it passes its
arguments, environment and streams to this server and ends. The server forks, and the child runs Ray's own worker
script, which registers with the raylet as usual. `forked_program.py` has a program run in the same way.

Ray reads the environment as soon as it is imported: a worker's job and raylet, and settings. So the server imports
everything but Ray, and forks a server for each job on a node, and for programs with other settings, which imports Ray.
"""

from __future__ import annotations

import ctypes
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from forked_worker import SOCKET_VARIABLE

from raycore.node.processes import is_running

SERVER_PATH = __file__

WORKER_PATH = str(Path(__file__).with_name("forked_worker.py"))
"""What the raylet starts for each worker."""

SETUP_PATH = str(Path(__file__).with_name("setup_worker.py"))
"""What the raylet starts instead for a worker with a runtime environment."""

PROGRAM_PATH = str(Path(__file__).with_name("forked_program.py"))
"""What to run in the place of a Python program."""

OUTLIVING_VARIABLE = "RAYCORE_TEST_OUTLIVING"
"""Environment variable, set where workers whose raylet is killed have to end by themselves."""

_MODULES_WITHOUT_RAY = (
    *("raycore.engine.core", "raycore.executor.inline", "raycore.worker.worker", "jsonschema", "numpy.ma"),
    *("pydantic.main", "pydantic.types", "pydantic.v1"),
)
_WORKER_MODULES = (
    *("ray._private.workers.default_worker", "ray._private.arrow_serialization", "ray._common.pydantic_compat"),
    "ray._private.workers.setup_worker",
)
"""None may declare an actor class: Ray draws a random id for it, and all workers would then draw the same ids."""

_PROGRAM_MODULES = ("ray.scripts.scripts", "raycore.cluster.local_ray.start", "pytest")

_MAX_BYTES = 1 << 17
_POLL_INTERVAL_S = 1.0
_PR_SET_PDEATHSIG = 1


def serve(path: str, modules: tuple[str, ...]) -> None:
    """Fork a process for each connection, until standard input ends.

    `modules`: those to import besides, as far as they are installed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the program that started this
    servers: dict[object, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)  # Ray can start while this imports
        found = [name for name in modules if find_spec(name.partition(".")[0]) is not None]
        _import((*_MODULES_WITHOUT_RAY, *found))
        while select.select([listener, sys.stdin], [], [])[0] == [listener]:
            connection, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
            kind, _, environment, _ = marshal.loads(message)
            settings = {name: value for name, value in environment.items() if name.startswith(b"RAY_")}
            if kind == "worker":
                # workers may be started before the node knows for which job
                settings = {name: settings.get(name) for name in (b"RAY_JOB_ID", b"RAY_RAYLET_PID")}
            which = kind, *sorted(settings.items())
            if which not in servers:
                servers[which], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for each in (listener, connection, *servers.values()):
                        each.close()
                    for stream in streams:  # else whoever reads them never comes to their end
                        os.close(stream)
                    _serve_like(theirs, kind, environment)
                theirs.close()
            socket.send_fds(servers[which], [message], [*streams, connection.fileno()])
            connection.close()
            for stream in streams:
                os.close(stream)


def _serve_like(requests: socket.socket, kind: str, environment: dict[bytes, bytes]) -> NoReturn:
    """Fork a process for each request, as long as the server runs, and the raylet of workers."""
    _set_environment(environment)
    _import(_WORKER_MODULES if kind == "worker" else _PROGRAM_MODULES)
    raylet = os.environ.get("RAY_RAYLET_PID")
    while raylet is None or is_running(int(raylet)):
        if select.select([requests], [], [], _POLL_INTERVAL_S)[0]:
            message, descriptors, _, _ = socket.recv_fds(requests, _MAX_BYTES, 4)
            if not message:
                break
            if os.fork() == 0:
                requests.close()
                _run(*marshal.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    os._exit(0)


def _run(
    kind: str, arguments: list[str], environment: dict[bytes, bytes], directory: str, descriptors: list[int]
) -> NoReturn:
    *streams, connection = descriptors
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_environment(environment)
    os.chdir(directory)
    if kind == "worker":
        os.close(connection)
        if OUTLIVING_VARIABLE not in os.environ:
            # A worker that is starting when its raylet ends waits for a minute. The parent ends soon after the raylet.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(_run_script(_worker_command(arguments)))
    status = _run_script(arguments)
    os.write(connection, bytes([status]))
    os._exit(status)


def _worker_command(arguments: list[str]) -> list[str]:
    """Ray's script for workers, and its arguments. Sets the environment variables of a runtime environment."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import default_worker, setup_worker

    options, others = setup_worker.parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}")
    if context.serialize() != RuntimeEnvContext(env_vars=context.env_vars).serialize():
        os.execv(sys.executable, [sys.executable, setup_worker.__file__, default_worker.__file__, *arguments])
    update_envs(context.env_vars)
    return [default_worker.__file__, *others]


def _run_script(arguments: list[str]) -> int:
    """The exit status of a Python program."""
    sys.argv = arguments
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
    status = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def _set_environment(environment: dict[bytes, bytes]) -> None:
    os.environ.clear()
    os.environb.update(environment)


def _import(modules: tuple[str, ...]) -> None:
    gc.disable()  # what is imported stays
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()  # children don't touch, and so don't copy, what is there already
    gc.enable()


if __name__ == "__main__":
    serve(os.environ[SOCKET_VARIABLE], tuple(sys.argv[1:]))
