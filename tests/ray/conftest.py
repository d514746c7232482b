"""Fixtures of the tests with engines, and of those that compare them with transformers."""

import os

import pytest
from equality import Checkpoints, Lasting, living_workers


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """All processes of a run share them."""
    folder = tmp_path_factory.getbasetemp()
    directory = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "checkpoints"
    directory.mkdir(exist_ok=True)
    return Checkpoints(directory)


@pytest.fixture(scope="module")
def workers_by_sizes(ray_cluster, checkpoints):
    with Lasting(lambda sizes: living_workers(ray_cluster, checkpoints, sizes)) as workers:
        yield workers


@pytest.fixture
def workers(request, workers_by_sizes):
    return workers_by_sizes.of(request.param)


@pytest.fixture(scope="module", autouse=True)
def _control_actors_come_when_they_are_used(request):
    """Nothing controls the unnamed engines of most tests from another process, and a control actor takes a second of
    CPU time to start. A module that does it has `USES_CONTROL`."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(request.module, "USES_CONTROL"):
            patch.setattr("raycore.control.program._DELAY_S", 3600.0)
        yield
