"""When the build asks for a compiler, with compilers that only say whether they work."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import raycore_build
from setuptools import Distribution, Extension

from raycore import kernels

WORKS, FAILS = "exit 0", "echo 'probe.cpp:2:10: fatal error: cstring: No such file'; exit 1"
needs_zig_wheels = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="zig isn't asked for here"
)


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Puts scripts on an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CC", "CXX", "RAYCORE_CPU_KERNELS"):
        monkeypatch.delenv(name, raising=False)

    def install(scripts: dict[str, str]) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return install


@needs_zig_wheels
@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize(
    ("scripts", "environment", "asks"),
    [
        ({}, {}, True),
        ({"gcc": WORKS, "cc": WORKS}, {}, True),  # without g++
        ({"c++": FAILS, "g++": FAILS}, {}, True),  # without headers
        ({"c++": WORKS}, {}, False),
        ({"g++": FAILS, "c++": FAILS, "clang++": WORKS}, {}, False),
        ({"c++": WORKS}, {"CXX": "no-such-compiler"}, True),
        ({"own": WORKS}, {"CXX": "own -v"}, False),
        ({"own": WORKS, "c++": FAILS}, {"CC": "cc", "CXX": "own"}, False),
        ({"gcc": FAILS, "g++": WORKS}, {"CC": "gcc"}, True),
        ({"own": WORKS}, {"CC": "own gcc"}, False),
        ({}, {"RAYCORE_CPU_KERNELS": "none"}, False),
    ],
)
def test_the_build_requires_ziglang_if_no_compiler_works(monkeypatch, compilers, kind, scripts, environment, asks):
    compilers(scripts)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hook = f"get_requires_for_build_{kind}"
    monkeypatch.setattr(raycore_build.build_meta, hook, lambda settings: ["wheel"])
    assert getattr(raycore_build, hook)() == ["wheel", *[raycore_build.ZIG] * asks]


def build(monkeypatch, tmp_path, is_inplace: bool = False) -> tuple[dict[str, str], str]:
    """The record of a build, and the text of its library, in a package with a library of an earlier one."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.cpp").touch()
    extension = Extension("package._cpu", ["package/a.cpp"], py_limited_api=True, optional=True)
    command = raycore_build.BuildKernels(Distribution({"ext_modules": [extension], "packages": ["package"]}))
    command.build_lib, command.inplace = str(tmp_path / "lib"), is_inplace
    command.ensure_finalized()
    for folder in (package, tmp_path / "lib" / "package"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_cpu.abi3.so").write_text("an earlier one")
    command.run()
    folder = package if is_inplace else tmp_path / "lib" / "package"
    library = folder / "_cpu.abi3.so"
    return json.loads((folder / "_cpu.json").read_text()), library.read_text() if library.exists() else ""


OUTPUT = '''for each; do previous=$last last=$each; done; echo new > "$last"'''
"""A compiler that only writes its output, which it is told last."""


@pytest.mark.parametrize("is_inplace", [False, True])
def test_the_build_records_what_compiled_the_kernels(monkeypatch, compilers, tmp_path, is_inplace):
    compilers({"own": OUTPUT})
    monkeypatch.setenv("CXX", "own -v")
    record, library = build(monkeypatch, tmp_path, is_inplace)
    assert record == {"machine": platform.machine(), "compiler": "own -v", "instruction_sets": ""}
    assert library == "new\n"


@pytest.mark.parametrize("is_inplace", [False, True])
def test_the_build_records_that_nothing_could_compile_them(monkeypatch, compilers, tmp_path, is_inplace):
    compilers({"c++": FAILS})
    monkeypatch.setattr(raycore_build.importlib.util, "find_spec", lambda name: None)
    record, library = build(monkeypatch, tmp_path, is_inplace)
    assert library == ""
    assert "c++: probe.cpp:2:10: fatal error: cstring: No such file" in record["failure"]
    assert "clang++: not found" in record["failure"]
    assert "mend one of these compilers" in record["remedy"]
    assert "ziglang" in record["remedy"]


def test_the_build_records_an_error_of_the_compiler(monkeypatch, compilers, tmp_path):
    compilers({"own": 'case "$*" in *probe*) ;; *) echo "a.cpp:1: error: what"; echo more; exit 1;; esac'})
    monkeypatch.setenv("CXX", "own")
    record, library = build(monkeypatch, tmp_path)
    assert library == ""
    assert "failed: a.cpp:1: error: what" in record["failure"]
    assert "set CXX" in record["remedy"]
    assert record["output"] == "a.cpp:1: error: what\nmore"


def test_ziglang_compiles_for_every_processor_of_this_machines_kind(monkeypatch, compilers):
    compilers({})
    monkeypatch.setattr(raycore_build.importlib.util, "find_spec", lambda name: object())
    compile_command, link_command = raycore_build._compiler()
    assert compile_command[:4] == [sys.executable, "-m", "ziglang", "c++"]
    for command in (compile_command, link_command):
        assert command[4:] in (["-target", f"{platform.machine()}-linux-gnu.2.17"], ["-mcpu=baseline"])


SOURCES = sorted(path.stem for path in (Path(kernels.__file__).parent / "csrc").glob("*.cpp"))
COMMON = {"neon", "ops"}
"""They need no instruction set. On x86-64, `neon` is empty."""
OLD = {"sse4_2"}
HASWELL = OLD | {"avx2", "fma", "f16c"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
ICE_LAKE = SKYLAKE | {"avx512_vnni"}
ZEN_5 = ICE_LAKE | {"avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN_5 | {"amx_tile", "amx_bf16"}
OF_AVX2 = {"avx2", "avx2_panels", "avx2_integers"}
WIDE = {"avx512", "avx512_panels"}


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Makes this machine's processor one with these flags."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(raycore_build, "CPUINFO", tmp_path / "cpuinfo")

    def have(flags: set[str]) -> None:
        lines = ["processor\t: 0", f"flags\t\t: fpu {' '.join(sorted(flags))} sse2", "bugs\t\t: spectre_v1"]
        (tmp_path / "cpuinfo").write_text("\n".join(lines * 2))

    return have


def used(choice: str) -> set[str]:
    sets = raycore_build.wanted_sets(choice)
    return {source for source in SOURCES if raycore_build.is_used(source, sets, choice)} - COMMON


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        (OLD, OF_AVX2),
        (HASWELL, OF_AVX2),
        (SKYLAKE, WIDE | {"avx512_integers"}),
        (ICE_LAKE, WIDE | {"avx512_vnni"}),
        (ZEN_5, WIDE | {"avx512_vnni", "avx512_bf16"}),
        (SAPPHIRE_RAPIDS, WIDE | {"avx512_vnni", "avx512_bf16", "amx"}),
        (SAPPHIRE_RAPIDS - {"avx512_vnni"}, WIDE | {"avx512_integers"}),  # a set needs those before it
    ],
)
def test_only_kernels_are_compiled_that_this_machines_processor_uses(processor, flags, files):
    processor(flags)
    assert used("auto") == files


def test_packages_for_other_machines_have_the_kernels_of_all_processors(processor):
    processor(HASWELL)
    assert used("all") == set(SOURCES) - COMMON


def test_the_kernels_of_another_processor_are_compiled_if_they_are_asked_for(processor):
    processor(ZEN_5)
    assert used("avx2") == OF_AVX2
    assert used("avx512_vnni") == WIDE | {"avx512_vnni"}


def test_all_kernels_are_compiled_where_nobody_knows_the_processor(processor):
    assert used("auto") == set(SOURCES) - COMMON - {"avx2", "avx2_panels", "avx2_integers", "avx512_integers"}


@pytest.mark.parametrize(
    ("is_inplace", "environment", "choice"), [(True, None, "all"), (False, None, "auto"), (True, "avx2", "avx2")]
)
def test_editable_installations_have_all_kernels_because_tests_compare_them(
    monkeypatch, compilers, tmp_path, is_inplace, environment, choice
):
    compilers({"own": OUTPUT})
    monkeypatch.setenv("CXX", "own")
    if environment is not None:
        monkeypatch.setenv("RAYCORE_CPU_KERNELS", environment)
    asked: list[str] = []
    monkeypatch.setattr(raycore_build, "wanted_sets", lambda choice: asked.append(choice) or [])
    build(monkeypatch, tmp_path, is_inplace)
    assert asked == [choice]
