"""What file systems have left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycore.node.disk import free_bytes, room_of


def test_free_room_is_what_this_user_may_still_write(monkeypatch: pytest.MonkeyPatch):
    usage = SimpleNamespace(f_bavail=3, f_bfree=9, f_blocks=1024, f_frsize=1 << 18)
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    assert free_bytes("/any") == 3 << 18
    assert room_of("/any") == ": 0.8 MiB of 256 MiB are free"


def test_a_path_that_does_not_exist_yet_is_on_its_parents_file_system(tmp_path: Path):
    assert free_bytes(tmp_path / "a" / "b") is not None
    assert room_of(tmp_path / "a" / "b").endswith(" MiB are free")


def test_what_is_not_known_is_not_said(monkeypatch: pytest.MonkeyPatch):
    def fail(path: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "statvfs", fail)
    assert free_bytes("/any") is None
    assert room_of("/any") == ""
