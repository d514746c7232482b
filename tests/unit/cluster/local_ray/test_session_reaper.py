"""What is left of a session after its leader has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest
from waiting import LONG_S

from raycore.cluster.local_ray import session_reaper
from raycore.node.processes import is_running, wait_until_gone

LEADER = """
import os, subprocess, sys
children = [
    subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL),
    subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, preexec_fn=os.setpgrp),
]
print(*(child.pid for child in children), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_reaper_kills_only_the_session_whose_leader_has_ended():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", LEADER], **pipes, start_new_session=True) as leader,
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as other,
    ):
        try:
            children = [int(word) for word in leader.stdout.readline().split()]
            reaper = subprocess.Popen([sys.executable, "-I", "-S", session_reaper.__file__, str(leader.pid)])
            with pytest.raises(subprocess.TimeoutExpired):
                reaper.wait(0.5)
            assert all(map(is_running, children))
            leader.kill()
            assert wait_until_gone(children, LONG_S) == []
            assert reaper.wait(LONG_S) == 0
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_reaper_takes_a_leader_that_has_ended_already():
    with subprocess.Popen(["true"]) as leader:
        leader.wait()
    assert subprocess.run([sys.executable, session_reaper.__file__, str(leader.pid)], timeout=LONG_S).returncode == 0
