"""The real engine over simulated workers: no seed shows a fault, and each fault that is put in is shown by some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.engine.faults import FAULTS

ROOT = Path(__file__).parents[2]


def run(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-m", "simulation.engine", *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=600.0,
    )


def test_outputs_are_what_follows_from_requests_and_a_seed_gives_the_same_run_in_any_process():
    found = [run("--seeds", "0", "12", "--processes", "2", "--digests", hash_seed=each) for each in ("1", "2")]
    lines = [each.stdout.splitlines() for each in found]
    assert [each.returncode for each in found] == [0, 0], [each.stdout + each.stderr for each in found]
    assert sorted(lines[0][:-1]) == sorted(lines[1][:-1])
    assert len(lines[0]) == 13
    assert lines[0][-1].startswith("12 seeds, 0 failed, ")


@pytest.mark.parametrize("part", range(6))
def test_a_hundred_seeds_show_each_fault(part: int):
    names = list(FAULTS)[part::6]
    found = run("--seeds", "0", "100", "--processes", "2", "--faults", *names)
    lines = dict(line.split(": ", 1) for line in found.stdout.splitlines())
    assert found.returncode == 0, found.stdout + found.stderr
    assert lines.keys() == set(names)
    assert all(line.startswith("seed ") for line in lines.values()), found.stdout


def test_the_story_of_a_seed_is_told():
    found = run("--seed", "1")
    assert found.returncode == 0, found.stdout
    assert " ends by " in found.stdout


@pytest.mark.parametrize("name", ["", "no_such_fault"])
def test_an_unknown_fault_is_refused(name: str):
    assert "invalid choice" in run("--seeds", "0", "1", "--faults", name).stderr
