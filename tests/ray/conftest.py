"""Fixtures of the tests that compare engines with transformers."""

import pytest
from equality import Checkpoints, living_workers


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return Checkpoints(lambda: tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def workers(request, ray_cluster, checkpoints):
    with living_workers(ray_cluster, checkpoints, request.param) as workers:
        yield workers
