"""Several nodes on one machine, as a program of its own: what happens to nodes isn't for the other tests' cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forked_ray
import pytest
import shared_memory
from number_formats import DTYPE


@pytest.mark.timeout(300)
def test_ranks_span_nodes_leave_drained_nodes_and_survive_lost_nodes():
    program = Path(__file__).with_name("several_nodes.py")
    shared_before = shared_memory.files()
    command = [sys.executable, forked_ray.__file__, str(program), DTYPE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    # Ray writes to standard output, too, when nodes crash
    assert [line for line in run.stdout.splitlines() if line.startswith("a rank ")] == [
        "a rank spans nodes",
        "a rank leaves a node that is drained",
        "a rank on a node that crashes is replaced",
        "a rank moves to a node that has joined",
    ], run.stderr[-4000:]
    assert run.returncode == 0
    assert shared_memory.abandoned_since(shared_before) == [], "of the processes that were killed"
