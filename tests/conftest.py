"""Shared by the tests that need a Ray cluster. The unit tests need none and don't import Ray."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# processes that tests start would else compile raycore's modules anew, each for itself, and pytest the tests
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# the processes of a run share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

# nothing is downloaded; huggingface_hub has to know before anything imports it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# without a GPU, Triton's kernels are interpreted; Triton has to know before anything imports it
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["heap_of_tests", "time_limits", "whole_parses"]

# how long an example takes says nothing on a machine that does other things
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

MAX_PROCESSES = 5
LONG_FILES = ("test_jobs.py", "test_ending_by_signal.py", "test_documentation.py", "test_step_memory.py")
"""They begin first, so that all processes end at about the same time."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process per core that this one may use, and one for when others wait. Single files run in this one."""
    if not any(Path(argument).is_dir() for argument in config.args):
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, MAX_PROCESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def _own_ray_directory() -> Iterator[None]:
    """For Ray's files, one of which holds the address of a cluster that programs join by themselves.

    Its path is short: Ray puts sockets there, whose names may have 107 characters.
    """
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        yield


def _is_not_rays(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != "ray"


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the test logs, without what Ray's threads say: the process may be connected to the session's cluster."""
    caplog.handler.addFilter(_is_not_rays)
    return caplog


@pytest.fixture(scope="session")
def site_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is on the path of Ray's workers, for packages that a test installs and removes again."""
    return tmp_path_factory.mktemp("site")


MODULES_OF_WORKERS = (
    *("pandas", "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet"),  # tasks of Ray Data
    *("fastapi", "uvicorn"),  # replicas of Ray Serve
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
)
"""What many of them import, and takes a second or more."""


@pytest.fixture(scope="session")
def ray_cluster(site_directory: Path):
    """A local cluster of this test session's own, with more CPUs than the machine has: little here computes for long.

    Gives the `ray` module. Tests that need a placement group or actors of their own remove them again.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # so Ray spells it
    # what tests name as `worker_cls`, or have actors use, has to be found by the workers
    folders = ("tests", "tests/ray", "tests/support", "tests/contract", "benchmarks", "build_backend")
    helpers = [str(Path(__file__).parents[1] / name) for name in folders]
    helpers.append(str(site_directory))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*helpers, os.environ.get("PYTHONPATH")]))
    import ray
    from forked_ray import fork_server, nodes_with_forked_workers
    from ray._private import auto_init_hook

    from raycore.cluster.local_ray.replacements import CLUSTER_PROCESSES, replaced

    # threads of Ray Serve's handles outlive the cluster, and their calls would start another as this process ends
    auto_init_hook.enable_auto_connect = False
    with fork_server(os.environ, *MODULES_OF_WORKERS), nodes_with_forked_workers(), replaced(CLUSTER_PROCESSES):
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
        try:
            yield ray
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def address(ray_cluster) -> str:
    """The address of the cluster, for programs that join it."""
    return ray_cluster.get_runtime_context().gcs_address
