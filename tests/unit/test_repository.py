"""What the repository holds: only the kinds of files that somebody meant to add."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]
KNOWN_FOLDERS = {
    ".ci",
    ".github",
    "benchmarks",
    "build_backend",
    "docs",
    "examples",
    "image",
    "placement",
    "raycore",
    "tests",
}
KNOWN_KINDS = {
    ".cpp",
    ".h",
    ".ipynb",
    ".json",
    ".md",
    ".png",
    ".py",
    ".safetensors",
    ".sh",
    ".svg",
    ".toml",
    ".typed",
    ".yaml",
    ".yml",
}
WITHOUT_KIND = {".dockerignore", ".gitignore", "Dockerfile", "LICENSE", "MANIFEST.in", "METADATA", "py.typed", "vllm"}
WITHOUT_KIND |= {"constraints.txt"}


def is_known(path: PurePath) -> bool:
    if path.parts[0] == ".ci":
        return True
    is_placed = len(path.parts) == 1 or path.parts[0] in KNOWN_FOLDERS
    return is_placed and (path.suffix in KNOWN_KINDS or path.name in WITHOUT_KIND)


def tracked() -> list[PurePath]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return [PurePath(name) for name in listed.stdout.split("\0") if name]


def test_only_known_kinds_of_files_are_tracked():
    assert [str(path) for path in tracked() if not is_known(path)] == []


@pytest.mark.parametrize(
    "name", ["logs/gptq_log.log", "trace.log", "core.1234", "notes/plan.md", "raycore/kernels/_cpu.so"]
)
def test_the_check_of_tracked_files_finds_leftovers(name):
    assert not is_known(PurePath(name))


def test_no_two_test_files_have_the_same_name():
    # pytest imports a test file by its name alone, so that a second one of that name is refused
    names = [path.name for path in tracked() if path.name.startswith("test_") and path.suffix == ".py"]
    assert sorted(names) == sorted(set(names))


def test_the_page_about_tests_says_what_each_file_with_a_real_ray_is_for():
    table = (
        (ROOT / "docs" / "architecture" / "testing.md")
        .read_text()
        .partition("## What only a real Ray shows")[2]
        .partition("\n## ")[0]
    )
    named = [name for row in table.splitlines() if row.startswith("|") for name in re.findall(r"`(\w+)`", row)]
    assert sorted(f"test_{name}.py" for name in named) == sorted(
        path.name for path in (ROOT / "tests" / "ray").glob("test_*.py")
    )
