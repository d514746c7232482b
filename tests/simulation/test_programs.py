"""What is put into the product is found by programs of their own, and by seeds with circumstances."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.forking import Programs

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("simulation.program raising 0 0 faults", 3),
        ("simulation.program places 0 2 faults", 2 + 4),
        ("simulation.program budgets 0 2 faults", 2 + 2),
        ("simulation.program forks 0 2 faults", 2 + 1),
        ("simulation.program bereft 0 2 faults", 2 + 1),
        ("simulation.program calls 0 5 faults", 5 + 4),
        ("simulation.cluster.circumstances.injected", 10),
    ],
)
def test_what_is_put_in_is_found(program: str, count: int, programs: Programs):
    run = programs.run(*program.split())
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) == count
    assert "failed:" not in run.stdout


@pytest.mark.timeout(700)
def test_callers_hear_of_interrupts_and_nothing_is_left_of_what_was_interrupted():
    # a process of its own: it imports the control plane with a place to be interrupted before each statement
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "tests/support"))
    command = [sys.executable, "-m", "simulation.program", "interrupts", "0", "8", "faults"]
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    stories, found = run.stdout.splitlines()[:8], run.stdout.splitlines()[8:]
    assert len(set(stories)) == 8
    assert "failed:" not in run.stdout
    assert len(found) == 3
