"""Shared by the tests that need a Ray cluster. The unit tests need none and don't import Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_server import SERVER_PATH, SOCKETS_VARIABLE, WORKER_PATH


@contextmanager
def fork_server(job_id: str, raylet_pid: int) -> Iterator[None]:
    """Starts the worker processes of this process's Ray job."""
    environment = os.environ | {"RAY_JOB_ID": job_id, "RAY_RAYLET_PID": str(raylet_pid)}
    with subprocess.Popen([sys.executable, SERVER_PATH], stdout=subprocess.PIPE, env=environment) as server:
        try:
            assert server.stdout.readline() == b"listening\n"
            yield
        finally:
            server.kill()


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """A local cluster of this test session's own, with more CPUs than the machine has: little here computes for long.

    Gives the `ray` module. Tests that need a placement group or actors of their own remove them again.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # so Ray spells it
    # what tests name as `worker_cls`, or have actors use, has to be found by the workers
    helpers = [str(Path(__file__).with_name(name)) for name in ("ray", "support")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*helpers, os.environ.get("PYTHONPATH")]))
    import ray
    from ray._private.node import Node

    start_raylet = Node.start_raylet

    def start_raylet_that_forks(node, *args):
        node._ray_params.worker_path = WORKER_PATH
        start_raylet(node, *args)

    os.environ[SOCKETS_VARIABLE] = str(tmp_path_factory.mktemp("fork"))
    Node.start_raylet = start_raylet_that_forks
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
        # else it starts a process for each CPU that is declared
        _system_config={"prestart_worker_first_driver": False},
    )
    Node.start_raylet = start_raylet
    (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
    with fork_server(ray.get_runtime_context().get_job_id(), raylet.process.pid):
        yield ray
    ray.shutdown()
