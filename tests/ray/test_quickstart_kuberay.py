"""What docs/quickstart-kuberay.md tells people to type, against a Ray of this machine in the place of a pod's.

Commands of kubectl, helm and docker need a cluster: `tests/unit/test_kuberay.py` checks what they name.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)  # a whole Ray, with its dashboard, and a process or two for each command
TOKEN = "0123456789abcdef" * 4


def commands() -> list[str]:
    blocks = re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "docs/quickstart-kuberay.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [line for block in blocks for line in block.splitlines()]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Pod:
    """A head that asks for a token, and ports in the place of those that are forwarded."""

    def __init__(self, folder: Path) -> None:
        self.dashboard, self.agent, self.api, client = free_ports(4)
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_worker_niceness": "0",
            "RAY_prestart_worker_first_driver": "0",  # else a process for each CPU that is declared
            "RAY_JOB_STOP_WAIT_TIME_S": "60",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        options = {
            "port": 0,
            "num-cpus": 8,
            "object-store-memory": 256 << 20,
            "dashboard-port": self.dashboard,
            "dashboard-agent-listen-port": self.agent,
            "ray-client-server-port": client,
            # also what keeps programs outside of this test from finding it
            "temp-dir": folder,
        }
        command = ["ray", "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())]
        self._process = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL)

    def is_ready(self) -> bool:
        """What cluster.yaml's probe asks, and the dashboard that jobs are sent to."""
        try:
            answers = httpx.get(f"http://127.0.0.1:{self.agent}/api/healthz"), self._get("/api/version")
        except httpx.TransportError:
            return False
        return all(answer.status_code == 200 for answer in answers)

    def serves(self) -> bool:
        """Whether the API answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.api}/health").status_code == 200
        except httpx.TransportError:
            return False

    def is_closed_to_strangers(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.dashboard}/api/jobs/").status_code == 401

    def run(self, command: str) -> str:
        """A line of the quick start. Returns what it writes."""
        command = command.replace("localhost:8265", f"127.0.0.1:{self.dashboard}")
        command = re.sub("localhost:800[01]", f"127.0.0.1:{self.api}", command)
        command = command.replace("raycore serve --host 0.0.0.0", f"raycore serve --host 127.0.0.1 --port {self.api}")
        ended = subprocess.run(
            ["bash", "-euc", command],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.dashboard}{path}", headers={"authorization": f"Bearer {TOKEN}"})


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    pod = Pod(tmp_path_factory.mktemp("ray"))
    try:
        until(pod.is_ready, timeout_s=90)
        yield pod
    finally:
        pod.stop()


def until(is_so, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it didn't come about"
        time.sleep(0.2)


def only(*words: str) -> str:
    """The one command that has these words."""
    (found,) = [command for command in commands() if all(word in command for word in words)]
    return found


def test_every_command_is_run_or_needs_a_cluster():
    run = [only(*words) for words in JOBS] + [only(*words) for words in SERVICE]
    elsewhere = ("kubectl ", "helm ", "docker ", "kind ", "export ")
    # the service's is the same as the job's, and test_ray_serve.py asks Ray Serve
    left = set(commands()) - set(run) - {only("curl", "8001")}
    assert [command for command in left if not command.startswith(elsewhere)] == []


JOBS = [["raycore generate"], ["--working-dir"]]
SERVICE = [["raycore serve"], ["curl", "8000"], ["raycore status"], ["raycore scale"], ["ray job stop"]]


def test_jobs(pod):
    assert pod.is_closed_to_strangers()
    generate, script = (only(*words) for words in JOBS)
    assert "27 + 58 = 85" in pod.run(generate)
    assert "431 - 87 =  344" in pod.run(script)


def test_the_api_as_a_job(pod):
    serve, curl, status, scale, stop = (only(*words) for words in SERVICE)
    pod.run(serve)
    until(pod.serves, timeout_s=90)
    assert json.loads(pod.run(curl))["choices"][0]["text"] == " 85"
    assert json.loads(pod.run(only("curl", "8001")))["choices"][0]["text"] == " 85"
    assert "2 of 2 ranks serving" in pod.run(status)
    assert "3 of 3 ranks serving" in pod.run(scale)
    assert "stopped" in pod.run(stop).lower()
    logs = pod.run(stop.replace("stop", "logs"))
    assert "raycore: serving sums" in logs
    assert "nothing left to do" in logs
