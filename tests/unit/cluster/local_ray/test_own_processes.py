"""Processes that the program's signals don't reach, and the reapers of raylets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG_S

from raycore.cluster.local_ray import own_processes
from raycore.cluster.local_ray.own_processes import RayProcess, wait_for_reapers
from raycore.node.processes import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="own sessions are for Linux")


RAYLET = """#!/bin/sh
sleep 1000 >&2 &
echo $!
wait
"""


def test_a_process_has_its_own_session_and_ends_by_terminate_although_sigterm_is_blocked():
    with RayProcess(["sleep", "1000"]) as process:
        assert os.getsid(process.pid) == process.pid
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.terminate()
        assert process.wait(LONG_S) == -signal.SIGKILL


def test_a_failed_process_start_raises_in_the_caller_and_later_starts_work():
    with pytest.raises(FileNotFoundError):
        RayProcess(["/no/such/program"])
    assert RayProcess(["true"]).wait(LONG_S) == 0


def test_children_of_a_raylet_have_ended_once_its_reaper_was_waited_for(tmp_path: Path):
    raylet = tmp_path / "raylet"
    raylet.write_text(RAYLET)
    raylet.chmod(0o755)
    with RayProcess([str(raylet)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait(LONG_S)
        wait_for_reapers(LONG_S)
        assert wait_until_gone([child], 0.0) == []
    assert own_processes._reapers == []
