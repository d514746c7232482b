"""Starts worker processes of Ray as forks of a process that has imported what they need.

Ray starts a Python process for each worker. Ours then import Ray and torch: 2 to 5 CPU seconds each, most of what the
tests that need a cluster took. Here the raylet starts `forked_worker.py` instead, which needs neither: it passes its
arguments, environment and streams to this server and ends. The server forks, and the child runs Ray's own worker
script, which registers with the raylet as usual.

Ray reads a worker's job and raylet from the environment as soon as it is imported. So the server imports everything
but Ray, and forks a server for each job on a node, which imports Ray, too.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from raycore.node.processes import is_running

SOCKET_VARIABLE = "RAYCORE_TEST_FORK_SERVER"
"""Environment variable with the path of the server's Unix socket."""

SERVER_PATH = __file__

WORKER_PATH = str(Path(__file__).with_name("forked_worker.py"))
"""What the raylet starts for each worker."""

_MODULES_WITHOUT_RAY = ("raycore.engine.core", "raycore.executor.inline", "raycore.worker.worker", "jsonschema")
_MODULES = ("ray._private.workers.default_worker",)
"""Modules to import. None may declare an actor class: Ray draws a random id for it, and all workers would then draw the
same ids.
"""

_MAX_BYTES = 1 << 17
_POLL_INTERVAL_S = 1.0


def serve(path: str) -> None:
    """Fork a worker for each connection, until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the program that started this
    jobs: dict[tuple[str | None, str], socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)  # Ray can start while this imports
        _import(_MODULES_WITHOUT_RAY)
        while select.select([listener, sys.stdin], [], [])[0] == [listener]:
            connection, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
            connection.close()
            environment = json.loads(message)["environment"]
            # workers may be started before the node knows for which job
            job = environment.get("RAY_JOB_ID"), environment["RAY_RAYLET_PID"]
            if job not in jobs:
                jobs[job], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    listener.close()
                    for connection in jobs.values():
                        connection.close()
                    _serve_job(theirs, environment)
                theirs.close()
            socket.send_fds(jobs[job], [message], streams)
            for stream in streams:
                os.close(stream)


def _serve_job(requests: socket.socket, environment: dict[str, str]) -> NoReturn:
    """Fork a worker for each request, as long as the job's raylet and the server run."""
    os.environ.clear()
    os.environ.update(environment)
    _import(_MODULES)
    while is_running(int(environment["RAY_RAYLET_PID"])):
        if select.select([requests], [], [], _POLL_INTERVAL_S)[0]:
            message, streams, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
            if not message:
                break
            if os.fork() == 0:
                requests.close()
                _run_worker(json.loads(message), streams)
            for stream in streams:
                os.close(stream)
    os._exit(0)


def _run_worker(request: dict[str, Any], streams: list[int]) -> NoReturn:
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    script = sys.modules["ray._private.workers.default_worker"].__file__
    assert script is not None
    sys.argv = [script, *request["arguments"]]
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _import(modules: tuple[str, ...]) -> None:
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()  # children don't touch, and so don't copy, what is there already


if __name__ == "__main__":
    serve(os.environ[SOCKET_VARIABLE])
