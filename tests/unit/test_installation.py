"""What the pages tell people to install, installed: from a copy of the checkout, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from installation import INSTALL_S, PACKAGES, ROOT, Installation
from kernel_bits import INSTRUCTION_SETS

NO_SUCH_EXTRA = "does not provide the extra"
"""pip only warns of it."""

HAS_ZIG = importlib.util.find_spec("ziglang") is not None
START_S = 60.0
TOKEN = "a-token"

# the first test that runs makes the installation, and the last one installs once more
pytestmark = pytest.mark.timeout(2 * INSTALL_S + START_S)


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    made = Installation(tmp_path_factory.mktemp("installation"))
    # tests/ray/test_copies_of_raycore.py compiles the kernels, and uses them
    printed = made.run(pip_command("quickstart-notebook.md"), RAYCORE_CPU_KERNELS="none")
    assert "Successfully installed raycore" in printed
    assert NO_SUCH_EXTRA not in printed
    return made


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def pip_command(name: str) -> str:
    """What a page says to install, apart from JupyterLab, which only the last test needs."""
    (command,) = re.findall(r"pip install [^`&]+", page(name))
    return command.replace(" jupyterlab", "")


def test_all_files_of_the_packages_are_installed(installation):
    for package in PACKAGES:
        files = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*") if path.is_file()]
        files = [file for file in files if not {"__pycache__", "csrc"} & set(file.parts)]  # C++ sources are compiled
        files = [file for file in files if file.suffix != ".so"]
        assert len(files) > 5
        assert [file for file in files if not (installation.site_packages / file).exists()] == []
    printed = installation.run("python -I -c 'import raycore.demo; print(raycore.demo.demo_model_path())'")
    assert printed.startswith(str(installation.site_packages))
    assert "run-batch" in installation.run("raycore --help")


@pytest.mark.parametrize(
    ("name", "found"),
    [("quickstart-job.md", "Would install raycore"), ("quickstart-kuberay.md", "already satisfied: ray[default]")],
)
def test_the_extras_that_a_page_installs_exist(installation, name, found):
    printed = installation.run(pip_command(name).replace("install", "install --dry-run"))
    assert found in printed
    assert NO_SUCH_EXTRA not in printed


def install_without_a_compiler(installation: Installation, folder: Path) -> str:
    """What loading the kernels prints then: their instruction set, or why there are none."""
    installation.run(f"pip install --target {folder} .", CXX="no-such-compiler", RAYCORE_CPU_KERNELS="auto")
    return installation.run(
        f"cd {folder} && python -c 'from raycore.kernels import library; print(library.load())'",
        PYTHONPATH=str(folder),
        RAYCORE_CPU_KERNELS="auto",
    )


def test_an_editable_installation_goes_before_a_folder_called_raycore(tmp_path):
    """Such as a clone that lies beside a program. Python would take it for a package without code."""
    made = Installation(tmp_path)
    made.run("pip install -e .", RAYCORE_CPU_KERNELS="none")
    assert (made.checkout / "raycore" / "kernels" / "_cpu.json").exists(), "the build's record is beside the sources"
    (tmp_path / "raycore").mkdir()
    (tmp_path / "program.py").write_text("from raycore import LLM; import raycore; print(raycore.__file__)")
    assert made.run(f"python {tmp_path / 'program.py'}") == f"{made.checkout / 'raycore' / '__init__.py'}\n"


@pytest.mark.skipif(HAS_ZIG, reason="ziglang is installed")
def test_everything_but_the_kernels_is_installed_without_a_compiler(installation, tmp_path):
    printed = install_without_a_compiler(installation, tmp_path)
    assert f"raycore, imported from {tmp_path / 'raycore'}, can't use its native kernels" in printed
    assert "no-such-compiler: not found" in printed
    assert "ziglang was not installed" in printed
    assert printed.endswith("None\n")


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_ZIG, reason="needs ziglang")
def test_ziglang_compiles_the_kernels_without_a_compiler(installation, tmp_path):
    printed = install_without_a_compiler(installation, tmp_path)
    assert printed.strip() in INSTRUCTION_SETS
    assert "ziglang" in json.loads((tmp_path / "raycore" / "kernels" / "_cpu.json").read_text())["compiler"]


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
    # the command installs raycore first; its kernels were compiled for the tests before
    lab = installation.bash(command, RAYCORE_CPU_KERNELS="none", **dict.fromkeys(folders, str(tmp_path)))
    try:
        ask = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"token {TOKEN}"})
        deadline_s = time.monotonic() + INSTALL_S + START_S
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
