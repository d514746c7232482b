"""bash as the reader of the quick start on Kubernetes has it, with a Ray of this machine in the place of every pod."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from job_cluster import ROOT, free_ports
from stand_ins.world import World

STAND_INS = ("docker", "helm", "kind", "kubectl")
SCRIPT_S = 500.0
"""A whole page takes a fifth of that, on a machine that does nothing else."""
_PYTHONPATH = os.pathsep.join(str(ROOT / "tests" / folder) for folder in ("ray", "support"))


class KubernetesShell:
    """It has no variable of Ray's, and a home of its own."""

    def __init__(self, folder: Path, dashboard: str, token: str, programs_directory: Path) -> None:
        """`programs_directory`: of programs that take the place of installed ones."""
        self.volumes = folder / "volumes"
        self._printed = folder / "printed.txt"
        self._api_port, *local_ports = free_ports(4)
        self._local_ports = dict(zip(("8265", "8000", "8001"), local_ports, strict=True))
        pod_ports = {"8265": int(dashboard.rpartition(":")[2]), "8000": self._api_port}
        world = World(dashboard, token, pod_ports, self._local_ports, str(self.volumes))
        world.save(folder / "world.json")
        programs = folder / "bin"
        programs.mkdir()
        for name in STAND_INS:
            (programs / name).write_text(
                f'#!/bin/sh\nPYTHONPATH={_PYTHONPATH} exec {sys.executable} -m stand_ins.{name} "$@"\n'
            )
            (programs / name).chmod(0o755)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "HOME": str(folder),
            "PATH": f"{programs}:{programs_directory}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STAND_INS": str(folder / "world.json"),
        }

    def run(self, script: str) -> str:
        """What commands print, in the repository's root. Each has to succeed; those in the background end with it."""
        for port, here in self._local_ports.items():
            script = script.replace(f"localhost:{port}", f"localhost:{here}")
        script = script.replace("raycore serve --host 0.0.0.0", f"raycore serve --port {self._api_port}")
        with self._printed.open("w") as printed:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = None
            try:
                status = shell.wait(SCRIPT_S)
            except subprocess.TimeoutExpired:
                pass  # what was printed until then tells more
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
        assert status == 0, self._printed.read_text()
        return self._printed.read_text()
