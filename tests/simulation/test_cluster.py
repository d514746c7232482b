"""Seeds of the whole simulated cluster, and the scenarios that have found something once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


def simulate(*arguments: str, hash_seed: str = "0", root: Path = ROOT) -> str:
    """What the tool prints. Fails if a seed does. `root`: a path of this project."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
    cwd = root.parent  # a process would take the working directory's real path
    run = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.timeout(700)
def test_no_judge_finds_anything_in_these_seeds():
    assert "40 seeds, 0 failed" in simulate("--seeds", "0", "40")


@pytest.mark.timeout(700)
def test_nor_in_these_in_which_threads_change_between_statements():
    assert "15 seeds, 0 failed" in simulate("--seeds", "0", "15", "--at-statements")


@pytest.mark.timeout(700)
def test_a_seed_has_the_same_story_whatever_the_hashes_and_addresses_and_folders_are(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(ROOT)
    one = simulate("--seeds", "0", "10", "--digests", hash_seed="1")
    other = simulate("--seeds", "0", "10", "--digests", hash_seed="2", root=elsewhere)
    assert one.splitlines()[:-1] == other.splitlines()[:-1]
    assert len(set(one.splitlines())) == 11


@pytest.mark.timeout(700)
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_is_mended(path: Path):
    assert "digest" in simulate("--file", str(path))


_SENT_TWICE = """
import simulation.ray.modules
from simulation import mutations, mutate
found = mutations.in_file(mutate.ROOT / "raycore/client/rank_connections.py", mutate.ROOT)
(mutation,) = [each for each in found if each.kind == "a message sent twice" and "submit.remote" in each.before]
print(mutate.look(mutation, 0)[0])
"""


@pytest.mark.timeout(700)
def test_a_request_that_is_sent_twice_is_found_without_any_fault():
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", _SENT_TWICE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout == "without faults\n"
