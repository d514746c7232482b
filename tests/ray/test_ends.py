"""What ends with a node or an owner on another node, and that nothing of it remains. `tests/chaos/ends.py` has more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import forked_ray
import pytest
from chaos import ends
from fork_server import OUTLIVING_VARIABLE, SOCKET_VARIABLE


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("driver: SIGKILL to its node's raylet", "the Ray node of this process has ended"),
        ("actor, owner on the other node, reaper elsewhere: SIGKILL to its node's raylet", ""),
    ],
)
def test_nothing_remains_of_an_engine(row: str, error: str):
    # as a program of its own: its clusters, and the server of their forks, which has the mark, aren't other tests'
    environment = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE}
    environment |= {ends.MARK: uuid.uuid4().hex, OUTLIVING_VARIABLE: "1", "RAY_prestart_worker_first_driver": "0"}
    command = [sys.executable, forked_ray.__file__, ends.__file__, "--rows", row]
    run = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False, env=environment)
    (result,) = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert result["row"] == row
    assert result["left"] == []
    assert (result["error"] or "").startswith(error)
    assert run.returncode == 0, run.stderr[-4000:]
