"""`python -m raycore.compat.vllm`: programs and commands in which `vllm` is raycore's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raycore.compat import run

SCRIPT = """
import subprocess
import sys
from importlib.metadata import version

import vllm
from vllm.sampling_params import SamplingParams

assert __name__ == "__main__"
print(sys.argv[1:], vllm.__version__, version("vllm"), SamplingParams.__module__)
child = "import vllm.sampling_params as s; import raycore; print(s.SamplingParams is raycore.SamplingParams)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def run_compat(*args: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raycore.compat.vllm", *args]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_and_the_programs_that_it_starts_get_raycore(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "script.py").write_text(SCRIPT)
    # vLLM is installed, too
    installed = tmp_path / "installed"
    (installed / "vllm").mkdir(parents=True)
    (installed / "vllm" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    (installed / "vllm-9.9.dist-info").mkdir()
    (installed / "vllm-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")

    done = run_compat("-u", "elsewhere/script.py", "--flag", "-c", cwd=tmp_path, PYTHONPATH=str(installed))

    assert done.stdout.splitlines() == ["['--flag', '-c'] 0.32.0 0.32.0 raycore.sampling_params", "True"], done.stderr
    assert done.stderr == "raycore: vLLM 9.9 is installed; this program uses raycore's vllm instead\n"


def test_modules_of_vllm_that_are_commands_run(tmp_path):
    # in a program that such a program starts, too
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'vllm.entrypoints.openai.api_server', '-h'])"
    assert run_compat("-c", code, cwd=tmp_path).stdout.startswith("usage: raycore serve [MODEL]")


def test_commands_are_raycores(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["raycore.compat.vllm", "serve", "--help"])
    with pytest.raises(SystemExit):
        run.main(["serve", "--help"])
    assert capsys.readouterr().out.startswith("usage: raycore serve [MODEL]")
    monkeypatch.setattr(sys, "argv", ["api_server", "--help"])
    with pytest.raises(SystemExit):
        run.run_command("run-batch")
    assert capsys.readouterr().out.startswith("usage: raycore run-batch")


def test_the_path_is_printed_for_programs_that_are_started_otherwise(capsys):
    assert run.main(["--path"]) == 0
    path = capsys.readouterr().out.strip()
    assert (Path(path) / "vllm" / "__init__.py").exists()
    assert run.main([]) == 2
    assert "SCRIPT [ARGUMENT]..." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "name"),
    [(["script.py"], "."), (["-W", "error", "script.py"], "."), (["-m", "x"], "."), (["sub/script.py"], "sub")],
)
def test_another_vllm_that_would_be_imported_first_is_an_error(tmp_path, monkeypatch, capsys, args, name):
    package = tmp_path / name / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run.main(args) == 2
    assert f"{(tmp_path / name).resolve()} has a vllm of its own" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-I", "-E", "-sE"])
def test_flags_that_ignore_pythonpath_are_errors(capsys, flag):
    assert run.main([flag, "script.py"]) == 2
    assert f"{flag} has Python ignore PYTHONPATH" in capsys.readouterr().err
