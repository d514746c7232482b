"""Rays whose worker processes are forks of one process: see `fork_server`.

`python forked_ray.py PROGRAM ARGUMENT...` runs a program that starts such nodes.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fork_server import SERVER_PATH, SETUP_PATH, SOCKET_VARIABLE, WORKER_PATH
from ray._private import services
from ray._private.parameter import RayParams

from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, replaced


@contextmanager
def fork_server(environment: dict[str, str], *modules: str) -> Iterator[None]:
    """Set the variable in `environment` by which nodes find the server that runs meanwhile.

    `modules`: what its forks have imported besides, if it is installed.

    A program that tests with a server start has that one, unless they take the variable away: its workers are no
    descendants of the program, and lack the variables of its environment in `/proc`.
    """
    if SOCKET_VARIABLE in environment:
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        environment[SOCKET_VARIABLE] = os.path.join(directory, "server")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, SERVER_PATH, *modules], env=environment, **pipes) as server:
            assert server.stdout.readline() == b"listening\n"
            yield
        del environment[SOCKET_VARIABLE]


@contextmanager
def nodes_with_forked_workers() -> Iterator[None]:
    """Nodes that this process starts meanwhile have the fork server start their workers.

    They have no log monitor: it looks at the log of each worker that there has been, ten times a second.
    """
    update_if_absent = RayParams.update_if_absent
    ours = {"worker_path": WORKER_PATH, "setup_worker_path": SETUP_PATH, "include_log_monitor": False}

    def update_with_ours(params: RayParams, **defaults: Any) -> None:
        update_if_absent(params, **defaults | {name: ours[name] for name in defaults.keys() & ours})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayParams, "update_if_absent", update_with_ours)
        patch.setattr(services, "_site_flags", lambda: ["-S", "-E"])  # Python starts twice as fast
        yield


def main() -> None:
    """Run the program that the command line names."""
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    with nodes_with_forked_workers():
        if os.path.basename(sys.argv[0]) == "ray":  # `ray start`: the server has to outlive it
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            with fork_server(os.environ), replaced(CLUSTER_PROCESSES):  # pyright: ignore[reportArgumentType]
                runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
