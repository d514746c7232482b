"""Shared by the tests that need a Ray cluster. The unit tests need none and don't import Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A local cluster of this test session's own, with more CPUs than the machine has: little here computes for long.

    Gives the `ray` module. Tests that need a placement group or actors of their own remove them again.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # so Ray spells it
    # what tests name as `worker_cls`, or have actors use, has to be found by the workers
    helpers = [str(Path(__file__).with_name(name)) for name in ("ray", "support")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*helpers, os.environ.get("PYTHONPATH")]))
    import ray

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
    yield ray
    ray.shutdown()
