"""Whatever copies of raycore there are, the processes of an engine run the one that its driver imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installation import INSTALL_S, ROOT, Installation, another_copy

from raycore import __version__
from raycore.kernels import VARIABLE, compiled

pytestmark = pytest.mark.timeout(INSTALL_S + 100)

OURS = [str(ROOT / "raycore/__init__.py"), str(ROOT / "placement/__init__.py")]
TIMEOUT_S = 280.0


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler, and pip would bring one")
def test_the_first_command_of_the_readme_runs_on_the_kernels_that_it_compiled(tmp_path, monkeypatch):
    """Although it is typed in a clone, which has no compiled kernels and is on the path of Ray's workers."""
    monkeypatch.delenv(VARIABLE, raising=False)
    command = re.findall(r"^```bash\n(python3 -m venv .*)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)[0]
    # the environment is there, and active
    install, generate = command.removeprefix("python3 -m venv .venv && . .venv/bin/activate && ").rsplit(" && ", 1)
    made = Installation(tmp_path)
    printed = made.run(f"{install} && {generate.replace('raycore ', 'raycore --log-level info ')}", RAY_ADDRESS="local")
    assert re.search(r"^27 \+ 58 = 85$", printed, re.MULTILINE)
    assert "backend native" in printed, printed
    assert not list((made.checkout / "raycore/kernels").glob("*.so"))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `several_copies.py` prints, run with the copy that these tests run."""
    other = another_copy(tmp_path_factory.mktemp("other"), "9.9")
    (other / "workers_of_a_user.py").write_text(
        "from raycore.worker.worker import Worker as Base\nclass Worker(Base): ..."
    )
    without_kernels = another_copy(tmp_path_factory.mktemp("without"))
    (without_kernels / "sitecustomize.py").write_text("import raycore\n")
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # a node would else start a process for each CPU, before any is needed
    environment |= {"PYTHONPATH": str(ROOT), "RAY_prestart_worker_first_driver": "0"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("several_copies.py")), str(other), str(without_kernels)],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    driver, *engines = re.findall(r"^engine: (.*)$", run.stdout, re.MULTILINE)
    assert driver == OURS[0]
    return engines


@pytest.mark.parametrize(
    ("way", "worker"),
    [(0, "raycore.worker.worker"), (1, "workers_of_a_user"), (2, "raycore.worker.worker")],
    ids=["current directory", "working_dir", "py_modules"],
)
def test_another_copy_on_the_path_of_the_workers_is_not_imported(lines, way, worker):
    """But a user's module that lies beside it is."""
    assert lines[way].split() == [*OURS, worker]


@pytest.mark.skipif(not compiled(), reason="raycore was installed without a compiler")
def test_a_node_without_kernels_is_refused_if_others_have_them(lines):
    told = lines[3]
    assert re.search(
        r"dp_rank \d on node \w{8} finds none in /\S+/raycore/kernels, but dp_rank \d on node \w{8} ", told
    )
    assert f"has them in {ROOT}/raycore/kernels" in told


def test_a_driver_of_another_version_than_the_nodes_is_refused_with_both_versions_and_folders(address, tmp_path):
    other = another_copy(tmp_path, "9.9")
    ended = subprocess.run(
        [sys.executable, "-m", "raycore", "generate", "--device", "cpu", "--num-threads", "1", "27 + 58 ="],
        env=os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": ""},
        cwd=other,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1
    told = ended.stderr.splitlines()[0]
    assert told.startswith("raycore: two copies of raycore with different versions can't work together: the driver ")
    assert re.search(rf"imported raycore 9\.9 \(sources \w+\) from {other}, a worker on ", told)
    assert re.search(rf"imported raycore {__version__} \(sources \w+\) from {ROOT}\.", told)
    assert "Traceback" not in ended.stderr
