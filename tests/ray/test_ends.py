"""What ends with a node or an owner on another node, and that nothing of it remains. `benchmarks/ends.py` has more."""

from __future__ import annotations

import json
import subprocess
import sys

import ends
import pytest


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("driver: SIGKILL to its node's raylet", "the Ray node of this process has ended"),
        ("actor, owner on the other node, reaper elsewhere: SIGKILL to its node's raylet", ""),
    ],
)
def test_nothing_remains_of_an_engine(row: str, error: str):
    # as a program of its own: its clusters aren't those of the other tests
    run = subprocess.run(
        [sys.executable, ends.__file__, "--rows", row], capture_output=True, text=True, timeout=480, check=False
    )
    (result,) = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert result["row"] == row
    assert result["left"] == []
    assert (result["error"] or "").startswith(error)
    assert run.returncode == 0, run.stderr[-4000:]
