"""A Ray cluster of `ray start`, for tests of jobs. It has ports and a directory of its own, and leaves no trace."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import forked_ray
import httpx
from fork_server import PROGRAM_PATH, SOCKET_VARIABLE
from forked_ray import fork_server
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from waiting import eventually

from raycore.node.processes import send_signal, wait_until_gone

ROOT = Path(__file__).parents[2]
STEP_S = 100.0
SCRIPT_S = 500.0
"""Whatever a test waits for comes well before, on a machine that does nothing else."""

_NODE_FLAGS = "--node-ip-address=127.0.0.1 --object-store-memory=100000000 --disable-usage-stats"

_PORTS = range(20_000, 1 << 16)
"""Ray gives its workers those from 10,002 to 19,999."""

_held_ports: list[socket.socket] = []

RAYS_OWN = ("ray::DashboardAgent", "ray::IDLE", "ray::JobSupervisor", "ray::RuntimeEnvAgent")

T = TypeVar("T")


class JobCluster:
    """Nothing runs before `start()`."""

    def __init__(self) -> None:
        # a short path: Ray puts sockets there, whose names may have 107 characters
        self.directory = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))
        dashboard_port, gcs_port, client_port, self.metrics_port, *self._agent_ports = free_ports(6)
        self._gcs_address = f"127.0.0.1:{gcs_port}"
        self._head_flags = f"--port={gcs_port} --dashboard-port={dashboard_port} --ray-client-server-port={client_port}"
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"
        self.token = ""
        self.programs_directory = self.directory / "bin"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        inherited.pop(SOCKET_VARIABLE, None)
        self._environment = inherited | {
            "HOME": str(self.directory),
            "PATH": f"{self.programs_directory}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support",
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_TMPDIR": str(self.directory),
            # after this time, `ray start` goes on without a dashboard
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{STEP_S:.0f}",
            "RAY_prestart_worker_first_driver": "0",  # else a process for each CPU that is declared
            "RAY_worker_niceness": "0",
        }
        self._exits = ExitStack()
        self._exits.enter_context(fork_server(self._environment))
        # `ray` and the workers of its nodes are forked, by a server of the cluster's own
        self.programs_directory.mkdir()
        program = self.programs_directory / "ray"
        ray = Path(sys.executable).with_name("ray")
        program.write_text(
            f"#!/bin/sh\nexport {SOCKET_VARIABLE}={self._environment[SOCKET_VARIABLE]}\n"
            f'exec {sys.executable} -S -E {PROGRAM_PATH} {forked_ray.__file__} {ray} "$@"\n'
        )
        program.chmod(0o755)
        self._http = httpx.Client(base_url=self.dashboard, timeout=STEP_S)

    def start(self, head_commands: str, worker_cpus: int) -> None:
        """Start a head node without CPUs by bash commands, which leave a token, and then a node that has some."""
        assert head_commands.count("ray start --head\n") == 1
        flags = f"{_NODE_FLAGS} --dashboard-agent-listen-port"
        self.bash(
            head_commands.replace(
                "--head\n",
                f"--head --num-cpus=0 --metrics-export-port={self.metrics_port} {self._head_flags} "
                f"{flags}={self._agent_ports[0]}\n",
            )
        )
        self.token = (self.directory / ".ray" / "auth_token").read_text()
        self._http.headers["Authorization"] = f"Bearer {self.token}"
        self._environment["RAY_AUTH_MODE"] = "token"
        # drivers would get each line of a log from each node's monitor
        flags = f"--include-log-monitor=false {flags}={self._agent_ports[1]}"
        self.bash(f"ray start --address={self._gcs_address} --num-cpus={worker_cpus} {flags}")

    def start_autoscaled(self, cpus_per_node: int, max_nodes: int) -> str:
        """Start a head node without CPUs whose autoscaler adds nodes on this machine. Returns the address."""
        config = {
            "cluster_name": "tests",
            # Ray's own `fake_multinode` lacks a file in the installed package
            "provider": {
                "type": "external",
                "module": "forked_node_provider.FakeMultiNodeProvider",
                "gcs_address": self._gcs_address,
                "head_node_id": FAKE_HEAD_NODE_ID,
                "launch_multiple": True,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "initialization_commands": [],
            "cluster_synced_files": [],
            "file_mounts": {},
            "upscaling_speed": 100,
            "max_workers": max_nodes,
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            "available_node_types": {
                FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "engines": {
                    "resources": {"CPU": cpus_per_node, "object_store_memory": 100_000_000},
                    "node_config": {},
                    "max_workers": max_nodes,
                },
            },
        }
        path = self.directory / "autoscaler.json"
        path.write_text(json.dumps(config))
        self._environment |= {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            # a node that has crashed counts as dead after 5 s, not 15
            "RAY_health_check_period_ms": "1000",
        }
        self.bash(
            f"ray start --head --num-cpus=0 --include-dashboard=false --autoscaling-config={path} "
            f"{self._head_flags} {_NODE_FLAGS} --dashboard-agent-listen-port={self._agent_ports[0]}"
        )
        return self._gcs_address

    def bash(self, script: str, cwd: Path | None = None) -> str:
        """What the commands of a user of the cluster print. Each of them has to succeed."""
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=cwd or self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

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

        return eventually(ended, lambda: self.logs(job_id))

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

    def assert_nothing_is_left(self) -> None:
        """No program runs on the cluster any more, and nothing that one had is there."""
        eventually(lambda: not self.living("actors", "DEAD"))
        eventually(lambda: not self.living("placement_groups", "REMOVED"))
        eventually(lambda: not self.programs())

    def close(self) -> None:
        """End every process of the cluster, and remove its directory."""
        self._http.close()
        self._exits.close()
        deadline_s = time.monotonic() + STEP_S
        while pids := list(self._processes()):
            assert time.monotonic() < deadline_s, f"processes {pids} don't end"
            send_signal(pids, signal.SIGKILL)
            wait_until_gone(pids, timeout_s=5)
        shutil.rmtree(self.directory)

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


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, and which no other test gets while this process lives.

    If there are others, they aren't among those that the system hands out: a process of Ray's could be given one of
    these before a test uses it.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in _PORTS if not low <= port <= high] or _PORTS
    ports = []
    for port in random.sample(candidates, len(candidates)):
        with ExitStack() as stack:
            try:
                # what tests hold is the UDP port of the same number
                held = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                held.bind(("127.0.0.1", port))
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            _held_ports.append(held)
            stack.pop_all()
        ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"fewer than {count} of {len(candidates)} ports are free")
