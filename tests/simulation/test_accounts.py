"""Each account is seen to name faults that are put into the product."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
NUM_SEEDS = 12
NUM_PARTS = 6


def run(*arguments: str) -> list[str]:
    """The lines that the program prints."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "simulation.cluster.planted", *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert not found.stderr, found.stderr
    return found.stdout.splitlines()


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_few_seeds_show_each_fault_and_the_account_names_it(part: int):
    names = run("0")[part::NUM_PARTS]
    lines = run(str(NUM_SEEDS), *names)
    faults = dict(line.split(": ", 1) for line in lines if ": seed " in line or "NOT FOUND" in line)
    assert list(faults) == names
    assert all(said.startswith("seed ") for said in faults.values()), "\n".join(lines)
