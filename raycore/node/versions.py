"""Which software and hardware this process runs on, as text for logs."""

from __future__ import annotations

import importlib.util
import logging
import platform
import re
import runpy
from importlib import metadata
from pathlib import Path

from raycore import __version__
from raycore.node.cpu_features import describe_cpu

logger = logging.getLogger(__name__)

TESTED = {"Ray": ("2.55", "2.60"), "torch": ("2.11", "2.14"), "transformers": ("5.0", "5.24")}
"""The oldest and the newest minor version on which raycore is tested. pyproject.toml admits the same range, except for
the newest torch: CONTRIBUTING.md says why."""

_GPUS = Path("/proc/driver/nvidia/gpus")


def version_of(package: str) -> str:
    """The version of an installed package, or `not installed`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cuda_of_torch() -> str | None:
    """The version of CUDA that the installed torch is built for. None: it is built without, or not installed.

    Doesn't import torch, which takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]


def versions() -> str:
    """The versions of raycore, Ray, torch and Python. Imports none of them."""
    others = ", ".join(f"{name} {version_of(name)}" for name in ("ray", "torch"))
    return f"raycore {__version__}, {others}, Python {platform.python_version()}"


def warn_if_untested(package: str, version: str) -> None:
    """Log a warning if raycore isn't tested with this version of `package`, a key of `TESTED`."""
    oldest, newest = TESTED[package]
    if not _minor(oldest) <= _minor(version) <= _minor(newest):
        logger.warning(
            "%s %s is installed here, but raycore %s is tested with %s %s to %s only. If anything fails, install one "
            "of these, the same on all nodes of the cluster.",
            *(package, version, __version__, package, oldest, newest),
        )


def hardware(cpuinfo: Path = Path("/proc/cpuinfo"), gpus: Path = _GPUS) -> str:
    """This node's processor with its features, and its GPUs. Doesn't initialize CUDA."""
    try:
        model, features = describe_cpu(cpuinfo.read_text(encoding="utf-8"))
    except OSError:
        model, features = platform.machine(), []
    names = [_gpu_name(path) for path in sorted(gpus.glob("*/information"))]
    counted = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return "; ".join([f"{model} ({' '.join(features)})" if features else model, *counted])


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _gpu_name(path: Path) -> str:
    found = re.search(r"^Model:\s*(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1).strip() if found else "unknown GPU"
