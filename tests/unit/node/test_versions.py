"""What a log says of the software and the hardware."""

from __future__ import annotations

import logging
import platform
import re
from importlib import metadata
from pathlib import Path

import pytest

from raycore import __version__
from raycore.node.cpu_features import describe_cpu
from raycore.node.versions import TESTED, hardware, version_of, versions, warn_if_untested

ROOT = Path(__file__).parents[3]
CPUINFO = """\
processor	: 0
model name	: A Processor
flags		: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16 sse

"""


def test_the_cpu_description_lists_the_features_that_choose_kernels():
    assert describe_cpu(CPUINFO) == ("A Processor", ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"])
    assert describe_cpu("Features : asimd sve bf16\n") == ("unknown", ["asimd", "bf16", "sve"])
    assert describe_cpu("") == ("unknown", [])


def test_versions_names_the_installed_versions():
    ray, torch = metadata.version("ray"), metadata.version("torch")
    assert versions() == f"raycore {__version__}, ray {ray}, torch {torch}, Python {platform.python_version()}"
    assert version_of("no-such-package-anywhere") == "not installed"


def test_the_hardware_description_names_the_processor_and_gpus(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO)
    cpu = "A Processor (avx2 avx512f avx512_bf16 amx_tile amx_bf16)"
    assert hardware(cpuinfo, tmp_path / "gpus") == cpu
    for name, model in (("0", "NVIDIA H100"), ("1", "NVIDIA H100"), ("2", "NVIDIA L4")):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text(f"Model: \t\t {model}\nIRQ: 3\n")
    assert hardware(cpuinfo, tmp_path / "gpus") == f"{cpu}; 2 x NVIDIA H100; 1 x NVIDIA L4"
    assert hardware(tmp_path / "none", tmp_path / "none") == platform.machine()


@pytest.mark.parametrize(
    ("package", "version"),
    [("Ray", "2.54.1"), ("Ray", "2.61.0"), ("Ray", "3.0.0.dev0"), ("torch", "2.10.0"), ("torch", "2.15.0+cu132")],
)
def test_a_version_outside_the_tested_range_is_warned_of(package: str, version: str, caplog: pytest.LogCaptureFixture):
    warn_if_untested(package, version)
    (message,) = caplog.messages
    oldest, newest = TESTED[package]
    assert message.startswith(f"{package} {version} is installed here")
    assert f"tested with {package} {oldest} to {newest} only" in message


@pytest.mark.parametrize(
    ("package", "version"),
    [("Ray", "2.55.0"), ("Ray", "2.60.3"), ("torch", "2.11.0+cpu"), ("torch", "2.14.1+cu130"), ("torch", "2.14.0a0")],
)
def test_a_version_in_the_tested_range_is_not_warned_of(package: str, version: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        warn_if_untested(package, version)
    assert caplog.messages == []


def test_the_tested_ranges_are_those_of_pyproject_and_ci():
    project = (ROOT / "pyproject.toml").read_text()
    oldest, newest = TESTED["Ray"]
    for requirement in ("ray[default]", "ray[serve]"):
        assert f'"{requirement}>={oldest},<2.{int(newest.split(".")[1]) + 1}"' in project
    oldest, newest = TESTED["torch"]
    assert f'"torch>={oldest},<{newest}"' in project
    oldest, newest = TESTED["transformers"]
    assert f'transformers = ["transformers>={oldest},<5.{int(newest.split(".")[1]) + 1}"]' in project
    (matrix,) = re.findall(r"^ *ray: (\[.*\])$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE)
    first, last = (int(version.split(".")[1]) for version in TESTED["Ray"])
    assert matrix == str([f"2.{minor}" for minor in range(first, last + 1)]).replace("'", '"')


@pytest.mark.parametrize("page", ["Dockerfile", "docs/quickstart-kuberay.md", "examples/ray_up/cluster.yaml"])
def test_documentation_pages_name_the_tested_ranges(page: str):
    assert " to ".join(TESTED["Ray"]) in (ROOT / page).read_text()
