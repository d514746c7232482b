"""Every compiler that builds the kernels makes the same numbers of them."""

from __future__ import annotations

import glob
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import kernel_bits
import pytest
import raycore_build
from native_kernels import ARM64_COMPILERS, emulated_ops, needs_kernels

from raycore.kernels import library

pytestmark = [needs_kernels, pytest.mark.timeout(900)]
"""Compiling all instruction sets takes a minute or two of processor time."""

SOURCES = Path(library.__file__).parent / "csrc"
PROGRAM = Path(kernel_bits.__file__)


def bits(path: Path) -> dict[str, dict[str, str]]:
    printed = subprocess.run([sys.executable, PROGRAM, path], check=True, capture_output=True, timeout=300).stdout
    return json.loads(printed)


@pytest.fixture(scope="module")
def installed() -> dict[str, dict[str, str]]:
    found = bits(library.find())
    assert len(found) > 1
    return found


@pytest.mark.parametrize("compiler", ["g++", "clang++", "ziglang"])
def test_kernels_of_different_compilers_give_the_same_bits(monkeypatch, tmp_path, installed, compiler):
    if compiler == "ziglang":
        if importlib.util.find_spec(compiler) is None:
            pytest.skip("needs ziglang")
        monkeypatch.setattr(raycore_build, "working_compiler", lambda tried: None)
    elif not shutil.which(compiler):
        pytest.skip(f"needs {compiler}")
    elif compiler in json.loads((SOURCES.parent / library.RECORD).read_text())["compiler"]:
        pytest.skip("compiled the installed library")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("CXXFLAGS", "-O1")  # with -O3, compiling takes twice as long
    path = tmp_path / "kernels.so"
    monkeypatch.setenv("RAYCORE_CPU_KERNELS", "all")
    raycore_build.compile_kernels(sorted(glob.glob(f"{SOURCES}/*.cpp")), path)
    assert bits(path) == installed


def test_integer_layers_give_the_same_bits_with_every_instruction_set(installed):
    found = [installed[name] for name in kernel_bits.INSTRUCTION_SETS if name in installed]
    for dtype in kernel_bits.DTYPES:
        assert len({digests[f"integer_linear {dtype}"] for digests in found}) == 1


def test_integer_layers_of_avx_vnni_give_the_same_bits_by_instructions_of_avx512(monkeypatch, tmp_path, installed):
    """Its kernels, in the place of those of AVX2, for processors that lack it."""
    if "avx512_vnni" not in installed:
        pytest.skip("needs a processor with VNNI")
    monkeypatch.setenv("CXXFLAGS", "-O1 -DRAYCORE_VNNI -mavx512vl -mavx512vnni")
    monkeypatch.setenv("RAYCORE_CPU_KERNELS", "avx2")
    path = tmp_path / "kernels.so"
    raycore_build.compile_kernels(sorted(glob.glob(f"{SOURCES}/*.cpp")), path)
    monkeypatch.delenv("RAYCORE_CPU_KERNELS")
    found = bits(path)["avx2"]
    for dtype in kernel_bits.DTYPES:
        name = f"integer_linear {dtype}"
        assert found[name] == installed["avx512_vnni"][name]


def test_kernels_on_arm64_give_the_same_bits_with_different_compilers():
    not_emulated = {"lora", "divided_attention", "latent_attention", "two_sided_attention"}
    kernels = [each for each in kernel_bits.KERNELS if each.__name__ not in not_emulated]
    first, second = (kernel_bits.digests(emulated_ops(compiler), kernels) for compiler in ARM64_COMPILERS)
    assert first == second
