"""Starts the worker processes of a test session's Ray as forks of one process that has imported what they need.

Ray starts a Python process for each worker. Ours then import Ray and torch: 2 to 5 CPU seconds each, most of what the
tests that need a cluster took. Here the raylet starts `forked_worker.py` instead, which needs neither: it passes its
arguments, environment and streams to this server and ends. The server forks, and the child runs Ray's own worker
script, which registers with the raylet as usual. Ray reads a worker's job from the environment as soon as it is
imported, so there is a server for one job: that of the tests themselves. The workers of other jobs, and of the Rays
that tested programs start, are started as usual.
"""

from __future__ import annotations

import array
import gc
import json
import os
import runpy
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path

SOCKETS_VARIABLE = "RAYCORE_TEST_FORK_SERVERS"
"""Environment variable with the path of a directory: it holds the server's Unix socket, named by the job's id."""

SERVER_PATH = __file__

WORKER_PATH = str(Path(__file__).with_name("forked_worker.py"))
"""What the raylet starts for each worker."""

_NUM_STREAMS = 3

_MODULES = (
    "ray._private.workers.default_worker",  # does nothing when it is imported
    "raycore.engine.core",
    "raycore.executor.inline",
    "raycore.worker.worker",
)
"""Modules to import. None may declare an actor class: Ray draws a random id for it, and all workers would then draw the
same ids.
"""


def serve(path: str) -> None:
    """Fork a worker for each connection, until the process that started this server has ended."""
    for name in _MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()  # children don't touch, and so don't copy, what is there already
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run_worker(connection)
            connection.close()


def _run_worker(connection: socket.socket) -> None:
    streams = array.array("i")
    received, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_LEN(_NUM_STREAMS * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    while part := connection.recv(1 << 20):
        received += part
    connection.close()
    request = json.loads(received)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    script = sys.modules["ray._private.workers.default_worker"].__file__
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


if __name__ == "__main__":
    serve(os.path.join(os.environ[SOCKETS_VARIABLE], os.environ["RAY_JOB_ID"]))
