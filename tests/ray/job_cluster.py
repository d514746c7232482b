"""A Ray cluster of `ray start`, for tests of jobs. It has ports and a directory of its own, and leaves no trace."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from raycore.processes import send_signal, wait_until_gone

ROOT = Path(__file__).parents[2]
STEP_S = 60.0
"""Whatever a test waits for comes well before."""

RAYS_OWN = ("ray::DashboardAgent", "ray::IDLE", "ray::JobSupervisor", "ray::RuntimeEnvAgent")

T = TypeVar("T")


class JobCluster:
    """Nothing runs before `start()`, or a program with `environment` and `head_flags`, has started it."""

    def __init__(self) -> None:
        # a short path: Ray puts sockets there, whose names may have 107 characters
        self.directory = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))
        self._dashboard_port, *ports = free_ports(5)
        self.gcs_address = f"127.0.0.1:{ports[0]}"
        self.head_flags = [
            f"--port={ports[0]}",
            "--node-ip-address=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
            f"--ray-client-server-port={ports[1]}",
            f"--dashboard-agent-listen-port={ports[2]}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        self._second_agent_port = ports[3]
        token = secrets.token_hex(16)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "HOME": str(self.directory),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_API_SERVER_ADDRESS": self.url,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_TMPDIR": str(self.directory),
            "RAY_worker_niceness": "0",
        }
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=STEP_S)

    @property
    def url(self) -> str:
        """The dashboard's."""
        return f"http://127.0.0.1:{self._dashboard_port}"

    def start(self, head_cpus: int, worker_cpus: int) -> None:
        """Two nodes on this machine."""
        self._ray("start", "--head", f"--num-cpus={head_cpus}", *self.head_flags)
        self._ray(
            *("start", f"--address={self.gcs_address}", f"--num-cpus={worker_cpus}", "--node-ip-address=127.0.0.1"),
            *(f"--dashboard-agent-listen-port={self._second_agent_port}", "--object-store-memory=100000000"),
            "--disable-usage-stats",
        )

    def submit(self, *arguments: str, **environment: str) -> str:
        """Submit a command. Returns the job's id."""
        body = {"entrypoint": " ".join(arguments), "runtime_env": {"env_vars": environment}}
        return self._answer("POST", "/api/jobs/", json=body)["submission_id"]

    def stop(self, job_id: str) -> None:
        """`ray job stop`, without waiting."""
        self._answer("POST", f"/api/jobs/{job_id}/stop")

    def wait(self, job_id: str) -> tuple[str, int | None, str]:
        """Wait for a job's end. Returns its status, its exit status, and the last line that it wrote."""

        def ended() -> tuple[str, int | None, str] | None:
            info = self._answer("GET", f"/api/jobs/{job_id}")
            if info["status"] in ("PENDING", "RUNNING"):
                return None
            return info["status"], info["driver_exit_code"], self.logs(job_id).splitlines()[-1]

        return eventually(ended)

    def logs(self, job_id: str) -> str:
        """What a job has written."""
        return self._answer("GET", f"/api/jobs/{job_id}/logs")["logs"]

    def living(self, what: str, *final_states: str) -> list[dict[str, Any]]:
        """The `actors` or `placement_groups` that are there, apart from those of Ray's jobs themselves."""
        result = self._answer("GET", f"/api/v0/{what}", params={"detail": "1"})["data"]["result"]["result"]
        return [
            each for each in result if each["state"] not in final_states and each.get("class_name") != "JobSupervisor"
        ]

    def programs(self, *words: str) -> list[int]:
        """Processes of jobs: their programs, and the actors of these; those whose command lines have all `words`."""
        return [
            pid
            for pid, line in self._processes().items()
            if ("/bin/raycore " in line or line.startswith("ray::")) and not line.startswith(RAYS_OWN)
            if all(word in line for word in words)
        ]

    def close(self) -> None:
        """End every process of the cluster, and remove its directory."""
        self._http.close()
        deadline_s = time.monotonic() + STEP_S
        while pids := list(self._processes()):
            assert time.monotonic() < deadline_s, f"processes {pids} don't end"
            send_signal(pids, signal.SIGKILL)
            wait_until_gone(pids, timeout_s=5)
        shutil.rmtree(self.directory)

    def _ray(self, *arguments: str) -> None:
        subprocess.run(
            ["ray", *arguments], env=self.environment, capture_output=True, text=True, timeout=STEP_S, check=True
        )

    def _answer(self, method: str, path: str, **options: Any) -> Any:
        response = self._http.request(method, path, **options)
        assert response.is_success, response.text
        return response.json()

    def _processes(self) -> dict[int, str]:
        """This cluster's processes with their command lines: those that name its directory, and what these started."""
        mark = str(self.directory)
        found: dict[int, str] = {}
        parents: dict[int, int] = {}
        lines: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                lines[int(entry.name)] = line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                is_zombie = not line
                if not is_zombie and (mark in line or mark.encode() in (entry / "environ").read_bytes()):
                    found[int(entry.name)] = line
            except (OSError, ValueError):
                continue  # it has just ended
        while more := {
            pid: lines[pid] for pid, parent in parents.items() if parent in found and pid not in found and lines[pid]
        }:
            found |= more
        return found


def eventually(look: Callable[[], T | None]) -> T:
    """What `look` finds, as soon as it does."""
    deadline_s = time.monotonic() + STEP_S
    while not (found := look()):
        assert time.monotonic() < deadline_s, "it doesn't come"
        time.sleep(0.05)
    return found


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
