"""raycore's manager and supervisor keep ranks running in simulated clusters in which something breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NUM_SEEDS = 60


def told_by(hash_seed: str) -> str:
    """What the program prints: a line for each seed, with the story's digest or the failure."""
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in ("", "tests", "tests/support")]
    return subprocess.run(
        [sys.executable, "-m", "simulation.ranks", "0", str(NUM_SEEDS)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_what_breaks_is_replaced_nothing_is_left_and_a_seed_has_one_story():
    told = told_by("1")
    assert "failed" not in told
    assert len(set(told.splitlines())) == NUM_SEEDS
    assert told_by("2") == told, "something depends on the order of a set"
