"""What a node daemon asks of its agent: files that name its ports, and an end with the daemon's."""

from __future__ import annotations

import subprocess
import sys
import time

from raycore.cluster import idle_agent
from raycore.node.processes import wait_until_gone

DAEMON = """
import os, subprocess, sys
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
print(subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.readline()
"""
TIMEOUT_S = 60.0


def test_it_says_that_it_has_no_ports_and_ends_with_the_daemon(tmp_path):
    arguments = [idle_agent.__file__, "agent.py", "--head", "--node-id=abc", f"--session-dir={tmp_path}"]
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with daemon:
        agent = int(daemon.stdout.readline())
        files = [tmp_path / f"{name}_abc" for name in idle_agent.PORTS]
        deadline_s = time.monotonic() + TIMEOUT_S
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert {file.read_text() for file in files} == {"-1"}
        assert wait_until_gone([agent], 0.0) == [agent]
    assert wait_until_gone([agent], TIMEOUT_S) == []
