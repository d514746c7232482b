"""What a node daemon asks of its agents: files that name their ports, and an end with the daemon's."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from waiting import LONG_S, eventually

from raycore.cluster.local_ray import idle_agent
from raycore.node.processes import wait_until_gone

DAEMON = """
import os, subprocess, sys
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
print(subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.readline()
"""

AGENT = """
import argparse, socket
parser = argparse.ArgumentParser()
for name in ("node-id", "session-dir", "node-ip-address", "runtime-env-agent-port"):
    parser.add_argument(f"--{name}")
arguments = parser.parse_args()
socket.socket().bind(("127.0.0.1", 0))  # as libraries do that look what the machine has
listener = socket.socket()
listener.bind((arguments.node_ip_address, int(arguments.runtime_env_agent_port)))
listener.listen()
for _ in range(2):
    connection, _ = listener.accept()
    connection.sendall(b"Ray's agent got " + connection.recv(100))
    connection.close()
"""


@contextmanager
def idle(kind: str, session: Path, *arguments: str) -> Generator[int, None, None]:
    """The pid of an agent, which has to end when its daemon has."""
    command = [idle_agent.__file__, kind, *arguments, "--node-id=abc", f"--session-dir={session}"]
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with daemon:
        agent = int(daemon.stdout.readline())
        yield agent
    assert wait_until_gone([agent], LONG_S) == []


def port(session: Path, name: str) -> int:
    """What the file of a port says."""
    file = session / f"{name}_abc"
    eventually(file.exists)
    return int(file.read_text())


def test_an_idle_dashboard_agent_has_no_ports_and_ends_with_its_daemon(tmp_path):
    with idle(idle_agent.DASHBOARD, tmp_path, "agent.py", "--head") as agent:
        assert {port(tmp_path, name) for name in idle_agent.DASHBOARD_PORTS} == {-1}
        assert wait_until_gone([agent], 0.0) == [agent]


LISTENING = ("--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0")


def test_an_idle_runtime_environment_agent_listens_and_ends_with_its_daemon(tmp_path):
    with idle(idle_agent.RUNTIME_ENV, tmp_path, "main.py", *LISTENING) as agent:
        assert port(tmp_path, idle_agent.RUNTIME_ENV_PORT) > 0
        assert wait_until_gone([agent], 0.0) == [agent]


def test_an_idle_runtime_environment_agent_becomes_rays_own_at_the_first_connection(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(AGENT)
    with idle(idle_agent.RUNTIME_ENV, tmp_path, str(script), *LISTENING):
        address = "127.0.0.1", port(tmp_path, idle_agent.RUNTIME_ENV_PORT)
        for message in (b"one", b"two"):
            with socket.create_connection(address, LONG_S) as connection:
                connection.settimeout(LONG_S)
                connection.sendall(message)
                assert connection.recv(100) == b"Ray's agent got " + message
