"""Seeds of the whole simulated cluster, and the scenarios that have found something once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.forking import Programs

ROOT = Path(__file__).parents[2]
FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.timeout(1600)
def test_no_judge_finds_anything_in_these_seeds(programs: Programs):
    found = programs.run("tests.simulation", "--seeds", "10", "40")  # those before them: see `test_stories`
    assert found.stdout.startswith("30 seeds, 0 failed"), found.stdout[-8000:] + found.stderr[-4000:]


@pytest.mark.timeout(700)
def test_nor_in_these_in_which_threads_change_between_statements():
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "0", "10", "--at-statements"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.stdout.startswith("10 seeds, 0 failed"), run.stdout[-8000:] + run.stderr[-4000:]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_is_mended(path: Path, programs: Programs):
    found = programs.run("tests.simulation", "--file", str(path))
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-4000:]
    assert "digest" in found.stdout


_SENT_TWICE = """
import simulation.ray.modules
from simulation import mutations, mutate
found = mutations.in_file(mutate.ROOT / "raycore/client/rank_connections.py", mutate.ROOT)
(mutation,) = [each for each in found if each.kind == "a message sent twice" and "submit.remote" in each.before]
mutate.Way.PLAIN.install()
print(mutate.look(mutation, [], 0, mutate.Way.PLAIN).kind)
"""


@pytest.mark.timeout(700)
def test_a_request_that_is_sent_twice_is_found_without_any_fault():
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", _SENT_TWICE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout == "without faults\n"
