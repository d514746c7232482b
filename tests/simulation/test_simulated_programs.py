"""Programs in simulated clusters in which things break, each over some seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def told_by(program: str, num_seeds: int, hash_seed: str) -> str:
    """What a program prints: a line for each seed, with the story's digest or the failure."""
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in ("", "tests", "tests/support")]
    return subprocess.run(
        [sys.executable, "-m", f"simulation.{program}", "0", str(num_seeds)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout


@pytest.mark.parametrize(("program", "num_seeds"), [("ranks", 60), ("owners", 30)])
def test_nothing_is_lost_nothing_is_left_and_a_seed_has_one_story(program: str, num_seeds: int):
    told = told_by(program, num_seeds, "1")
    assert "failed" not in told
    assert len(set(told.splitlines())) == num_seeds
    assert told_by(program, num_seeds, "2") == told, "something depends on the order of a set"
