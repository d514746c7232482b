"""What a log says of the software and the hardware."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from raycore import __version__
from raycore.node.cpu_features import describe_cpu
from raycore.node.versions import hardware, version_of, versions

CPUINFO = """\
processor	: 0
model name	: A Processor
flags		: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16 sse

"""


def test_a_processors_features_are_those_that_kernels_are_chosen_by():
    assert describe_cpu(CPUINFO) == ("A Processor", ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"])
    assert describe_cpu("Features : asimd sve bf16\n") == ("unknown", ["asimd", "bf16", "sve"])
    assert describe_cpu("") == ("unknown", [])


def test_versions_are_those_installed():
    ray, torch = metadata.version("ray"), metadata.version("torch")
    assert versions() == f"raycore {__version__}, ray {ray}, torch {torch}, Python {platform.python_version()}"
    assert version_of("no-such-package-anywhere") == "not installed"


def test_hardware_is_the_processor_and_gpus(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO)
    cpu = "A Processor (avx2 avx512f avx512_bf16 amx_tile amx_bf16)"
    assert hardware(cpuinfo, tmp_path / "gpus") == cpu
    for name, model in (("0", "NVIDIA H100"), ("1", "NVIDIA H100"), ("2", "NVIDIA L4")):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text(f"Model: \t\t {model}\nIRQ: 3\n")
    assert hardware(cpuinfo, tmp_path / "gpus") == f"{cpu}; 2 x NVIDIA H100; 1 x NVIDIA L4"
    assert hardware(tmp_path / "none", tmp_path / "none") == platform.machine()
