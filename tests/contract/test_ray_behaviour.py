"""The simulated Ray behaves as the installed one does, where raycore depends on it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_ray
import pytest
import ray_nodes
from rays import Row
from rows_of_actors import ACTORS
from rows_of_calls import CALLS
from rows_of_groups import GROUPS
from rows_of_nodes import NODES

ON_ONE_NODE = [*CALLS, *ACTORS, *GROUPS]
ALL = [*ON_ONE_NODE, *NODES]
LEAST_SEEDS, MOST_SEEDS = 8, 60
TESTS = Path(__file__).parents[1]


def name(row: Row) -> str:
    return row.name


def on_simulated(row: Row, seed: int) -> str:
    import simulated_ray
    from simulation.ray import api
    from simulation.ray.cluster import Cluster
    from simulation.world.kernel import World

    world = World(seed, last_s=1e4)
    cluster = Cluster(world)
    cluster.add_node(CPU=16, GPU=4)

    def driver() -> str:
        api.init()
        return repr(row.scenario(simulated_ray))

    found = world.run(driver)
    assert not world.failures, world.failures
    return found


@pytest.mark.parametrize("row", ALL, ids=name)
def test_the_simulated_ray_does_all_that_a_row_admits_and_nothing_else(row: Row) -> None:
    found: set[str] = set()
    for seed in range(MOST_SEEDS):
        found.add(on_simulated(row, seed))
        assert found <= {*row.admits, *row.seldom}, seed
        if seed >= LEAST_SEEDS and found >= set(row.admits):
            break
    assert found >= set(row.admits)


@pytest.mark.parametrize("row", [row for row in ON_ONE_NODE if row.source is None], ids=name)
def test_the_installed_ray_does_what_a_row_admits(row: Row, ray_cluster: Any) -> None:
    import installed_ray

    assert repr(row.scenario(installed_ray)) in {*row.admits, *row.seldom}


@pytest.fixture(scope="module")
def outcomes_on_nodes() -> dict[str, str]:
    """What a real cluster of several nodes does, by the names of the rows."""
    paths = [TESTS / "support", TESTS / "contract", TESTS / "ray", TESTS.parent / "build_backend", TESTS.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "RAY_worker_niceness": "0"}
    command = [sys.executable, forked_ray.__file__, ray_nodes.__file__, *(row.name for row in NODES if not row.is_slow)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr[-4000:]
    return {line["row"]: line["outcome"] for line in lines}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [row for row in NODES if not row.is_slow and row.source is None], ids=name)
def test_an_installed_ray_of_several_nodes_does_too(row: Row, outcomes_on_nodes: dict[str, str]) -> None:
    assert outcomes_on_nodes[row.name] in {*row.admits, *row.seldom}


@pytest.mark.parametrize("row", [row for row in ALL if row.source is not None], ids=name)
def test_rays_files_say_what_no_real_ray_can_be_made_to_show(row: Row) -> None:
    import ray

    assert row.source is not None
    file, text = row.source
    with (
        (Path(ray.__file__).parent / file).open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        assert content.find(text.encode()) >= 0
