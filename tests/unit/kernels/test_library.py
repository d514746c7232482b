"""Why the native kernels can't be used, as the log says it."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

from raycore.kernels import library


@pytest.fixture(autouse=True)
def _best_kernels(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "auto")


@pytest.fixture
def package(monkeypatch, tmp_path) -> Path:
    """The imported package, without a library."""
    path = tmp_path / "raycore"
    (path / "kernels").mkdir(parents=True)
    monkeypatch.setattr(library, "FOLDER", path / "kernels")
    monkeypatch.setattr(library, "_library", library._library.__wrapped__)  # this process may have loaded the real one
    return path


def record(package: Path, **values: str) -> None:
    (package / "kernels" / library.RECORD).write_text(json.dumps(values))


def warning(caplog) -> str:
    with caplog.at_level("WARNING"):
        assert library.load.__wrapped__() is None
    (message,) = caplog.messages
    return message


def test_a_checkout_that_was_never_installed_is_warned_of(package, caplog):
    (package.parent / "pyproject.toml").touch()
    message = warning(caplog)
    assert f"imported from {package}," in message
    assert "never compiled" in message
    assert f"`pip install -e {package.parent}`" in message


def test_a_copy_without_a_project_file_is_warned_of(package, caplog):
    message = warning(caplog)
    assert "never compiled" in message
    assert "install raycore on this machine, or import an installed raycore" in message


@pytest.mark.parametrize("output", ["", "vectors.h:1: error: what"])
def test_the_warning_tells_the_failure_that_the_build_recorded(package, caplog, output):
    record(package, machine="x86_64", failure="`cc x` failed: error", remedy="set CXX", output=output)
    message = warning(caplog)
    assert "kernels: `cc x` failed: error. Plain torch computes" in message
    assert "To get them, set CXX" in message
    assert (str(package / "kernels" / library.RECORD) in message) == bool(output)
    assert "install g++" not in message


def test_a_library_for_another_machine_is_warned_of(package, caplog):
    (package / "kernels" / "_cpu.abi3.so").write_bytes(b"\x7fELF")
    record(package, machine="s390x", compiler="g++")
    message = warning(caplog)
    assert f"compiled for s390x, and this is {platform.machine()}" in message
    assert "Install raycore again, on this machine" in message


def test_a_library_that_cannot_be_loaded_is_warned_of(package, caplog):
    (package / "kernels" / "_cpu.abi3.so").write_bytes(b"\x7fELF")
    record(package, machine=platform.machine(), compiler="g++")
    assert re.search(r"_cpu.abi3.so can't be loaded \(.*too short\)", warning(caplog))


class FakeLibrary:
    """A library on a processor with some instruction sets, which torch refuses. `missing`: it lacks these kernels."""

    def __init__(self, instruction_sets: list[str], missing: str | None = None) -> None:
        self._names = [name.encode() for name in instruction_sets]
        self._missing = None if missing is None else missing.encode()

    def raycore_missing(self) -> bytes | None:
        return self._missing

    def raycore_choose(self, choice: bytes) -> bytes | None:
        names = self._names if choice == b"auto" else [name for name in self._names if name == choice]
        return next(iter(names), None)

    def raycore_register(self, libtorch: bytes) -> bytes:
        return b"this version of torch has no function torch_library_impl"


def test_a_processor_that_is_too_old_for_the_kernels_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(library, "_library", lambda: FakeLibrary([]))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    message = warning(caplog)
    assert "a processor with AVX2" in message
    assert "g++" not in message


def test_an_instruction_set_asked_for_that_the_processor_lacks_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(library, "_library", lambda: FakeLibrary(["avx2"]))
    monkeypatch.setenv(library.VARIABLE, "amx")
    assert f"Unset {library.VARIABLE} to use the best kernels that it has: avx2." in warning(caplog)


def test_a_library_without_the_kernels_of_this_processor_is_warned_of(monkeypatch, package, caplog):
    """It was compiled on a machine with another one."""
    record(package, machine="x86_64", compiler="g++", instruction_sets="avx512, avx512_vnni")
    monkeypatch.setattr(library, "_library", lambda: FakeLibrary([], missing="avx2"))
    message = warning(caplog)
    assert "those for avx2, which this processor has, were not compiled" in message
    assert "the library has kernels for avx512, avx512_vnni. Plain torch computes" in message
    assert f"Install raycore on this machine, or anywhere with {library.VARIABLE}=all" in message


def test_a_library_with_slower_kernels_than_this_processor_could_use_is_warned_of(monkeypatch, package, caplog):
    record(package, machine="x86_64", compiler="g++", instruction_sets="avx2")
    monkeypatch.setattr(library, "_library", lambda: FakeLibrary(["avx2"], missing="amx"))
    with caplog.at_level("WARNING"):
        library.load.__wrapped__()
    message = caplog.messages[0]
    assert "uses its native kernels for avx2. Those for amx, which this processor has," in message
    assert "were not compiled: the library has kernels for avx2." in message
    assert f"{library.VARIABLE}=all" in message


def test_what_was_to_be_compiled_chooses_the_best_kernels(monkeypatch, caplog):
    asked: list[bytes] = []
    fake = FakeLibrary(["avx2"])
    monkeypatch.setattr(fake, "raycore_choose", lambda choice: asked.append(choice))
    monkeypatch.setattr(library, "_library", lambda: fake)
    monkeypatch.setenv(library.VARIABLE, "all")
    warning(caplog)
    assert asked == [b"auto"]


def test_a_torch_without_the_functions_of_the_kernels_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(library, "_library", lambda: FakeLibrary(["avx2"]))
    message = warning(caplog)
    assert "has no function torch_library_impl" in message
    assert re.search(r"Install torch[<>]", message)


def test_plain_torch_on_demand_logs_no_warning(monkeypatch, caplog):
    monkeypatch.setenv(library.VARIABLE, "none")
    assert library.load.__wrapped__() is None
    assert caplog.messages == []
