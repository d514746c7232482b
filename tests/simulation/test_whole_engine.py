"""Engines in simulated clusters serve all requests, with the tokens that follow from the request alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NUM_SEEDS = 20


def test_all_requests_get_their_tokens_though_things_break_and_nothing_is_left():
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in ("", "tests", "tests/support")]
    ran = subprocess.run(
        [sys.executable, "-m", "simulation.whole_engine", "0", str(NUM_SEEDS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "failed" not in ran.stdout
    assert len(set(ran.stdout.splitlines())) == NUM_SEEDS
