"""What a local Ray needs of the file systems, said before it starts."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from raycore.cluster.local_ray import room
from raycore.cluster.local_ray.room import check_room
from raycore.errors import InitializationError


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(room, "_LONGEST_PATH", len(str(tmp_path)) + 4)
    monkeypatch.setattr(room, "_SHARED_MEMORY", tmp_path)
    return tmp_path / "ray"


def test_where_there_is_room_nothing_is_left_behind(folder: Path):
    check_room()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_directory_is_named_with_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def allocate(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    said = f"can't write its sockets and logs to {folder} ({os.strerror(number)}: "
    with pytest.raises(InitializationError, match=re.escape(said) + r".* MiB of \d+ MiB are free\)\. Set RAY_TMPDIR"):
        check_room()


def test_a_directory_that_cannot_be_made_is_named(folder: Path):
    folder.write_text("a file is in its place")
    with pytest.raises(InitializationError, match=rf"logs to {re.escape(str(folder))} \(File exists"):
        check_room()


def test_missing_shared_memory_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "_SHARED_MEMORY", folder / "gone")
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(InitializationError, match=f"{re.escape(str(folder))}/gone, in which .* missing or can't be"):
        check_room()


def test_a_path_that_is_too_long_for_sockets_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", f"{folder.parent}x")
    said = (
        f"{folder.parent}x/ray, is too long for sockets. Set RAY_TMPDIR to one of at most {len(str(folder.parent))} ch"
    )
    with pytest.raises(InitializationError, match=re.escape(said)):
        check_room()
