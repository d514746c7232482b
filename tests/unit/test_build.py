"""When the build asks for a compiler, with compilers that only say whether they work."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import raycore_build
import raycore_package

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
    found = getattr(raycore_package, f"get_requires_for_build_{kind}")()
    assert found == [raycore_build.ZIG] * asks


@pytest.fixture
def checkout(monkeypatch, tmp_path) -> Path:
    """A small one, with the kernels of an earlier editable installation."""
    source, root = Path(raycore_package.__file__).parents[1], tmp_path / "checkout"
    for name in [
        "raycore/__init__.py",
        "placement/__init__.py",
        "raycore/kernels/__init__.py",
        "raycore/kernels/csrc/a.cpp",
    ]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py", "MANIFEST.in"):
        shutil.copyfile(source / name, root / name)
    shutil.copytree(source / "build_backend", root / "build_backend", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_cpu.abi3.so", "_cpu.json"):
        (root / "raycore/kernels" / name).write_text("an earlier one")
    monkeypatch.chdir(root)
    monkeypatch.setattr(raycore_build, "SOURCES", root / "raycore/kernels/csrc")
    return root


@pytest.fixture
def build(checkout, tmp_path) -> Callable[[bool], tuple[dict[str, str], str]]:
    """Returns the record of a build, and the text of its library."""

    def build(is_inplace: bool = False) -> tuple[dict[str, str], str]:
        name = (raycore_package.build_editable if is_inplace else raycore_package.build_wheel)(str(tmp_path))
        folder = checkout
        if not is_inplace:
            folder = tmp_path / "installed"
            zipfile.ZipFile(tmp_path / name).extractall(folder)
        library = folder / "raycore/kernels/_cpu.abi3.so"
        record = json.loads((folder / "raycore/kernels/_cpu.json").read_text())
        return record, library.read_text() if library.exists() else ""

    return build


OUTPUT = '''for each; do previous=$last last=$each; done; echo new > "$last"'''
"""A compiler that only writes its output, which it is told last."""


@pytest.mark.parametrize("is_inplace", [False, True])
def test_the_build_records_what_compiled_the_kernels(monkeypatch, compilers, build, is_inplace):
    compilers({"own": OUTPUT})
    monkeypatch.setenv("CXX", "own -v")
    record, library = build(is_inplace)
    assert len(record.pop("sources")) == 16
    assert record == {"machine": platform.machine(), "compiler": "own -v", "instruction_sets": ""}
    assert library == "new\n"


def test_the_build_records_which_sources_it_has_compiled(monkeypatch, compilers, build, checkout):
    compilers({"own": OUTPUT})
    monkeypatch.setenv("CXX", "own")
    before = build(True)[0]["sources"]
    assert build(True)[0]["sources"] == before
    (checkout / "raycore/kernels/csrc/a.h").touch()
    with_header = build(True)[0]["sources"]
    (checkout / "raycore/kernels/csrc/a.h").write_text("int a;")
    assert len({before, with_header, build(True)[0]["sources"]}) == 3


@pytest.mark.parametrize("is_inplace", [False, True])
def test_the_build_records_that_nothing_could_compile_them(monkeypatch, compilers, build, is_inplace):
    compilers({"c++": FAILS})
    monkeypatch.setattr(raycore_build.importlib.util, "find_spec", lambda name: None)
    record, library = build(is_inplace)
    assert library == ""
    assert "c++: probe.cpp:2:10: fatal error: cstring: No such file" in record["failure"]
    assert "clang++: not found" in record["failure"]
    assert "mend one of these compilers" in record["remedy"]
    assert "ziglang" in record["remedy"]


def test_the_build_records_an_error_of_the_compiler(monkeypatch, compilers, build):
    compilers({"own": 'case "$*" in *probe*) ;; *) echo "a.cpp:1: error: what"; echo more; exit 1;; esac'})
    monkeypatch.setenv("CXX", "own")
    record, library = build()
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
ALDER_LAKE = HASWELL | {"avx_vnni"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
ICE_LAKE = SKYLAKE | {"avx512_vnni"}
ZEN_4 = ICE_LAKE | {"avx512_bf16"}
ZEN_5 = ZEN_4 | {"avx_vnni"}
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
        (ALDER_LAKE, {"avx2", "avx2_panels", "avx_vnni"}),
        (SKYLAKE, WIDE | {"avx512_integers"}),
        (ICE_LAKE, WIDE | {"avx512_vnni"}),
        (ZEN_4, WIDE | {"avx512_vnni", "avx512_bf16"}),
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
    assert used("avx_vnni") == {"avx2", "avx2_panels", "avx_vnni"}
    assert used("avx512_vnni") == WIDE | {"avx512_vnni"}


def test_all_kernels_are_compiled_where_nobody_knows_the_processor(processor):
    assert used("auto") == set(SOURCES) - COMMON - OF_AVX2 - {"avx_vnni", "avx512_integers"}


@pytest.mark.parametrize(
    ("is_inplace", "environment", "choice"), [(True, None, "all"), (False, None, "auto"), (True, "avx2", "avx2")]
)
def test_editable_installations_have_all_kernels_because_tests_compare_them(
    monkeypatch, compilers, build, is_inplace, environment, choice
):
    compilers({"own": OUTPUT})
    monkeypatch.setenv("CXX", "own")
    if environment is not None:
        monkeypatch.setenv("RAYCORE_CPU_KERNELS", environment)
    asked: list[str] = []
    monkeypatch.setattr(raycore_build, "wanted_sets", lambda choice: asked.append(choice) or [])
    build(is_inplace)
    assert asked == [choice]


def contents(wheel: Path) -> dict[str, str]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def without_kernels(monkeypatch, checkout) -> Path:
    """A small checkout."""
    monkeypatch.setenv("RAYCORE_CPU_KERNELS", "none")
    return checkout


INFO = "raycore-0.1.0.dist-info"


def test_a_wheel_has_the_packages_files(without_kernels, tmp_path):
    data = {"raycore/py.typed", "raycore/assets/model/config.json", "raycore/compat/import_path/bin/run"}
    for name in [*data, "raycore/__pycache__/a.pyc", "raycore/.swp", "tests/a.py"]:
        (without_kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (without_kernels / name).touch()
    name = raycore_package.build_wheel(str(tmp_path))
    assert name.startswith("raycore-0.1.0-cp310-abi3-")
    own = {f"{each}/__init__.py" for each in ("raycore", "raycore/kernels", "placement")}
    files = contents(tmp_path / name)
    assert {each for each in files if not each.startswith(INFO)} == own | data | {"raycore/kernels/_cpu.json"}
    assert "an earlier one" not in files.values()
    assert "raycore = raycore.cli.main:main" in files[f"{INFO}/entry_points.txt"]


def test_pip_gets_the_metadata_before_the_wheel(without_kernels, tmp_path):
    name = raycore_package.prepare_metadata_for_build_wheel(str(tmp_path))
    files = contents(tmp_path / raycore_package.build_wheel(str(tmp_path), None, str(tmp_path / name)))
    assert name == INFO
    for path in (tmp_path / name).iterdir():
        if path.is_file():
            assert path.read_text() == files[f"{INFO}/{path.name}"]


LOGGING = 'echo "$*" >> "$LOG"; ' + OUTPUT


@pytest.mark.parametrize("is_inplace", [False, True])
def test_kernels_are_compiled_once_from_when_pip_asks_for_the_metadata(
    monkeypatch, compilers, checkout, tmp_path, is_inplace
):
    compilers({"own": LOGGING})
    monkeypatch.setenv("CXX", "own")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    kind = "editable" if is_inplace else "wheel"
    folder = getattr(raycore_package, f"prepare_metadata_for_build_{kind}")(str(tmp_path))
    build = getattr(raycore_package, f"build_{kind}")
    name = build(str(tmp_path), None, str(tmp_path / folder))
    commands = (tmp_path / "log").read_text().splitlines()
    assert len([command for command in commands if "/ops.cpp" in command]) == 1
    read = (checkout / "raycore/kernels/_cpu.abi3.so").read_text() if is_inplace else None
    assert (read or contents(tmp_path / name)["raycore/kernels/_cpu.abi3.so"]) == "new\n"


def test_kernels_are_compiled_again_if_that_was_ended(monkeypatch, compilers, checkout, tmp_path):
    compilers({"own": OUTPUT})
    monkeypatch.setenv("CXX", "own")
    (tmp_path / INFO).mkdir()
    (tmp_path / raycore_build.LOCK).touch()
    name = raycore_package.build_wheel(str(tmp_path), None, str(tmp_path / INFO))
    assert contents(tmp_path / name)["raycore/kernels/_cpu.abi3.so"] == "new\n"


def test_compiling_ends_once_pip_has_removed_the_metadata(monkeypatch, compilers, tmp_path):
    """As after `pip install --dry-run`."""
    compilers({"own": LOGGING})
    monkeypatch.setenv("CXX", "own")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    with pytest.raises(SystemExit):
        raycore_build._compile_ahead(tmp_path / "removed", "auto")
    assert "/ops.cpp" not in (tmp_path / "log").read_text()


def test_a_source_archive_builds_the_same_wheel(without_kernels, monkeypatch, tmp_path):
    (wheel := tmp_path / "wheel").mkdir()
    (again := tmp_path / "again").mkdir()
    raycore_package.build_wheel(str(wheel))
    with tarfile.open(tmp_path / raycore_package.build_sdist(str(tmp_path))) as archive:
        archive.extractall(tmp_path)
    unpacked = tmp_path / "raycore-0.1.0"
    assert (unpacked / "raycore/kernels/csrc/a.cpp").exists()
    monkeypatch.chdir(unpacked)
    name = raycore_package.build_wheel(str(again))
    assert contents(again / name) == contents(wheel / name)
