"""Copies of the checkout, and of raycore's packages, for tests of what is installed and imported."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from raycore.kernels import compiled

ROOT = Path(__file__).parents[2]
PACKAGES = ("raycore", "placement")
PIP_FLAGS = "--no-index --no-deps --no-build-isolation"
"""What would be downloaded is there already, or is left out."""

INSTALL_S = 300.0
"""Installing compiles the kernels."""


def another_copy(folder: Path, version: str | None = None) -> Path:
    """Copy raycore's packages, without compiled kernels, into `folder`. Returns `folder`.

    `version`: the copy's; None: raycore's.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so", "csrc"))
    if version is not None:
        front = folder / "raycore/__init__.py"
        front.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', front.read_text()))
    return folder


def _quick_compiler() -> str:
    """A script that takes the place of a C++ compiler.

    Pip has made these tests' own kernels by the same commands, so the script links those. Without them, it compiles
    without optimization, in a sixth of the time.
    """
    kernels = compiled()
    if not kernels:
        return '#!/bin/sh\nexec c++ "$@" -O0\n'
    return f"""#!/bin/sh
for last; do :; done  # the file to write
case " $* " in
    */csrc/*.cpp\\ *) exec touch "$last" ;;
    *.o\\ *) exec cp {kernels[0]} "$last" ;;
    *) exec c++ "$@" ;;  # a probe of what the compiler can do
esac
"""


class Installation:
    """A checkout, and an environment in which raycore isn't installed, but all is that is installed for these tests."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        ignored = shutil.ignore_patterns(".*", "*.egg-info", "*.so", "__pycache__", "build")
        shutil.copytree(ROOT, self.checkout, ignore=ignored)
        venv.create(folder / "venv", symlinks=True)
        paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        (self.site_packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
        self._scripts = folder / "venv" / "bin"
        (self._scripts / "pip").write_text(
            f'#!/bin/sh\nexec {sys.executable} -m pip --python {self._scripts}/python "$@" {PIP_FLAGS}\n'
        )
        self._compiler = self._scripts / "quick-c++"
        self._compiler.write_text(_quick_compiler())
        for script in (self._scripts / "pip", self._compiler):
            script.chmod(0o755)

    def bash(self, command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a page's command in the checkout, in a process group of its own."""
        path = f"{self._scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        compiler = {"CC": str(self._compiler), "CXX": str(self._compiler)}
        return subprocess.Popen(
            ["bash", "-euc", command],
            cwd=self.checkout,
            env=os.environ | {"PATH": path, "PYTHONPATH": ""} | compiler | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, **environment: str) -> str:
        """What a command prints, which has to succeed."""
        process = self.bash(command, **environment)
        try:
            printed, _ = process.communicate(timeout=INSTALL_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == 0, printed
        return printed
