"""What the pages tell people to install, installed: from a copy of the checkout, without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("raycore", "placement")
PIP_FLAGS = "--no-index --no-deps --no-build-isolation"
"""What would be downloaded is there already, or is left out."""

NO_SUCH_EXTRA = "does not provide the extra"
"""pip only warns of it."""

START_S = 60.0
INSTALL_S = 300.0
"""Installing compiles the kernels."""
TOKEN = "a-token"


class Installation:
    """A checkout, and an environment in which raycore isn't installed, but all is that is installed for these tests."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        shutil.copytree(ROOT, self.checkout, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build"))
        venv.create(folder / "venv", symlinks=True)
        paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        (self.site_packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
        self._scripts = folder / "venv" / "bin"
        (self._scripts / "pip").write_text(
            f'#!/bin/sh\nexec {sys.executable} -m pip --python {self._scripts}/python "$@" {PIP_FLAGS}\n'
        )
        # only whether the kernels are built matters here, and without optimization that takes a sixth of the time
        self._compiler = self._scripts / "quick-c++"
        self._compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
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

    def run(self, command: str) -> str:
        """What a command prints, which has to succeed."""
        process = self.bash(command)
        printed, _ = process.communicate(timeout=INSTALL_S)
        assert process.returncode == 0, printed
        return printed


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    made = Installation(tmp_path_factory.mktemp("installation"))
    printed = made.run(pip_command("quickstart-notebook.md"))
    assert "Successfully installed raycore" in printed
    assert NO_SUCH_EXTRA not in printed
    return made


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def pip_command(name: str) -> str:
    """What a page says to install, apart from JupyterLab, which only the last test needs."""
    (command,) = re.findall(r"pip install [^`&]+", page(name))
    return command.replace(" jupyterlab", "")


def test_all_files_are_installed(installation):
    for package in PACKAGES:
        files = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*")]
        files = [file for file in files if not {"__pycache__", "csrc"} & set(file.parts)]  # C++ sources are compiled
        assert len(files) > 5
        assert [file for file in files if not (installation.site_packages / file).exists()] == []
    printed = installation.run("python -I -c 'import raycore.demo; print(raycore.demo.demo_model_path())'")
    assert printed.startswith(str(installation.site_packages))
    assert "run-batch" in installation.run("raycore --help")


@pytest.mark.parametrize(
    ("name", "found"),
    [("quickstart-job.md", "Would install raycore"), ("quickstart-kuberay.md", "already satisfied: ray[default]")],
)
def test_what_a_page_installs_is_there(installation, name, found):
    printed = installation.run(pip_command(name).replace("install", "install --dry-run"))
    assert found in printed
    assert NO_SUCH_EXTRA not in printed


def test_jupyter_lab_makes_importing_ray_no_slower(installation):
    """A parser generator, in each of an engine's processes, would."""
    printed = installation.run(
        'python -c \'import sys, ray; print(sorted({"jsonschema", "lark"} & sys.modules.keys()))\''
    )
    assert printed == "['jsonschema']\n"


def test_jupyter_lab_shows_the_notebook(installation, tmp_path):
    (command,) = re.findall(r"^```bash\n(.*?)^```", page("quickstart-notebook.md"), re.MULTILINE | re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = {"ServerApp": {"port": port, "port_retries": 0, "open_browser": False, "allow_root": True}}
    config["IdentityProvider"] = {"token": TOKEN}
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps(config))
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    lab = installation.bash(command, **dict.fromkeys(folders, str(tmp_path)))
    try:
        ask = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"token {TOKEN}"})
        deadline_s = time.monotonic() + START_S
        while not answers(ask):
            assert lab.poll() is None, lab.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert "jupyter-config-data" in ask.get("/lab/tree/notebook.ipynb").text
        cells = ask.get("/api/contents/notebook.ipynb").json()["content"]["cells"]
        assert any("LLM.get_or_create" in cell["source"] for cell in cells)
        assert "python3" in ask.get("/api/kernelspecs").json()["kernelspecs"]
    finally:
        os.killpg(lab.pid, signal.SIGKILL)
        lab.communicate()


def answers(ask: httpx.Client) -> bool:
    try:
        return ask.get("/api/status").status_code == 200
    except httpx.TransportError:
        return False
