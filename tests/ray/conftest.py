"""Fixtures of the tests that compare engines with transformers."""

import pytest
from equality import Checkpoints, Lasting, living_workers


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return Checkpoints(lambda: tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def workers_by_sizes(ray_cluster, checkpoints):
    with Lasting(lambda sizes: living_workers(ray_cluster, checkpoints, sizes)) as workers:
        yield workers


@pytest.fixture
def workers(request, workers_by_sizes):
    return workers_by_sizes.of(request.param)
