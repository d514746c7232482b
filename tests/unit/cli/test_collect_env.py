"""`raycore collect-env`: what it shows, and what it must not."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from raycore import __version__
from raycore.cli import collect_env
from raycore.cli.main import main


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["collect-env"]) == 0
    return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())


def test_versions_and_hardware_are_shown(capsys):
    found = shown(capsys)
    assert found["raycore"] == __version__
    for name in ("python", "ray", "torch", "os", "kernel", "cpu", "cpu features", "cores", "memory", "/dev/shm"):
        assert found[name]
    assert found["ray"][0].isdigit()
    assert "by affinity" in found["cores"]


def test_collect_env_shows_no_environment_variable(capsys, monkeypatch):
    monkeypatch.setenv("RAYCORE_API_KEY", "a-secret-key")
    monkeypatch.setenv("HF_TOKEN", "a-secret-token")
    assert "a-secret" not in str(shown(capsys))


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_collect_env_shows_the_cpu_quota_in_cores(text, cores):
    assert collect_env.cpu_quota(text) == cores


@pytest.mark.parametrize(
    ("outcome", "name", "value"),
    [
        (FileNotFoundError(), "gpus", "none (there is no nvidia-smi)"),
        (subprocess.TimeoutExpired("nvidia-smi", 20), "gpus", "unknown: nvidia-smi took longer than 20 s"),
        (
            subprocess.CalledProcessError(9, "nvidia-smi", "no driver", ""),
            "gpus",
            "unknown: nvidia-smi failed: no driver",
        ),
        (subprocess.CompletedProcess((), 0, "A GPU, 80 GiB, 550, 9.0\n"), "gpu 0", "A GPU, 80 GiB, 550, 9.0"),
    ],
)
def test_collect_env_shows_the_gpus_of_nvidia_smi(outcome, name, value, capsys, monkeypatch):
    def run(*args: Any, **options: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    assert shown(capsys)[name] == value


def test_collect_env_says_that_a_package_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(collect_env, "PACKAGES", ("no-such-package-anywhere",))
    assert shown(capsys)["no-such-package-anywhere"] == "not installed"
