"""Seeds of engines of each capability: no judge finds anything, and each fault that is put in is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.cluster.deployments import injected

ROOT = Path(__file__).parents[2]
CAPABILITIES = ["pipeline", "experts", "models", "offload", "peers", "servers", "api_servers"]


def run(module: str, *arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_is_wrong_in_these_seeds_and_each_has_the_same_story_whatever_hashes_are(capability: str):
    asked = ["--seeds", "0", "3", "--deployment", capability, "--digests"]
    runs = [run("tests.simulation", *asked, hash_seed=each) for each in ("1", "2")]
    one, other = (each.stdout.splitlines() for each in runs)
    assert [each.returncode for each in runs] == [0, 0], runs[0].stdout[-8000:] + runs[0].stderr[-4000:]
    assert one[:-1] == other[:-1]
    assert one[-1].startswith("3 seeds, 0 failed")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", list(injected.FAULTS))
def test_seeds_find_this_fault(name: str):
    found = run("simulation.cluster.deployments.injected", "--seeds", "60", "--faults", name)
    assert found.stdout.startswith(f"{name}: seed "), found.stdout + found.stderr
