"""Ray's own autoscaler, which adds nodes for the ranks that wait: each node is a few processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job_cluster import JobCluster
from number_formats import DTYPE

PROGRAM = Path(__file__).with_name("autoscaled_engine.py")


@pytest.mark.timeout(300)
def test_the_autoscaler_adds_nodes_for_a_new_engine_and_for_a_rank_that_lost_its_node():
    cluster = JobCluster()
    try:
        address = cluster.start_autoscaled(cpus_per_node=1, max_nodes=3)
        said = cluster.bash(f"RAY_ADDRESS={address} {sys.executable} {PROGRAM} {DTYPE} 2>&1")
    finally:
        cluster.close()
    assert "an engine has its nodes come" in said
    assert "a rank whose node has crashed has another one come" in said
