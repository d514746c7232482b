"""`raycore collect-env`: facts about a machine for a bug report, without environment variables or secrets."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raycore import __version__
from raycore.node.cpu_features import CPU_FEATURES, describe_cpu

PACKAGES = (
    *("ray", "torch", "transformers", "numpy", "msgspec", "tokenizers", "safetensors", "llguidance"),
    *("fastapi", "uvicorn", "opentelemetry-sdk"),
)

_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader")
_GPU_TIMEOUT_S = 20.0


def add_collect_env_command(commands: Any) -> None:
    """Add `collect-env` to the command line."""
    command = commands.add_parser(
        "collect-env",
        help="show versions and hardware for a bug report",
        description="Show versions and hardware for a bug report. Environment variables are not shown.",
    )
    command.set_defaults(command=_collect_env)


def _collect_env(args: argparse.Namespace) -> int:
    for name, value in describe_machine():
        print(f"{name}: {value}")
    return 0


def describe_machine() -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each fact about this machine."""
    from raycore.node.versions import version_of  # imported lazily to keep `raycore --help` fast

    yield "raycore", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    for package in PACKAGES:
        yield package, version_of(package)
    yield "os", _os_name()
    yield "kernel", f"{platform.system()} {platform.release()} {platform.machine()}"
    model, features = describe_cpu(_text_of(Path("/proc/cpuinfo")))
    yield "cpu", model
    yield "cpu features", " ".join(features) or "none of " + " ".join(CPU_FEATURES)
    yield "cores", _cores()
    yield from _memory()
    yield from _gpus()


def cpu_quota(cpu_max: str) -> float | None:
    """The limit that a control group's cpu.max file sets, in cores; None if there is no limit. `cpu_max`: its text."""
    quota, _, period = cpu_max.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _os_name() -> str:
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text_of(Path("/etc/os-release")), re.MULTILINE)
    return name.group(1) if name else platform.platform()


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota(_text_of(Path("/sys/fs/cgroup/cpu.max")))
    limit = "no quota" if quota is None else f"quota of {quota:g}"
    return f"{usable} of {os.cpu_count()} by affinity; {limit}"


def _memory() -> Iterator[tuple[str, str]]:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text_of(Path("/proc/meminfo")), re.MULTILINE))
    for name, key in (("memory", "MemTotal"), ("memory available", "MemAvailable")):
        yield name, f"{int(found[key]) / 2**20:.1f} GiB" if key in found else "unknown"
    limit = _text_of(Path("/sys/fs/cgroup/memory.max")).strip()
    yield "memory limit", f"{int(limit) / 2**30:.1f} GiB" if limit.isdigit() else "none"
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    yield "/dev/shm", f"{shared.f_blocks * shared.f_frsize / 2**30:.1f} GiB" if shared else "missing"


def _gpus() -> Iterator[tuple[str, str]]:
    try:
        asked = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True)
    except FileNotFoundError:
        yield "gpus", "none (there is no nvidia-smi)"
    except subprocess.CalledProcessError as error:
        yield "gpus", f"unknown: nvidia-smi failed: {(error.stdout + error.stderr).strip()}"
    except subprocess.TimeoutExpired:
        yield "gpus", f"unknown: nvidia-smi took longer than {_GPU_TIMEOUT_S:g} s"
    else:
        for index, line in enumerate(asked.stdout.splitlines()):
            yield f"gpu {index}", line


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
