"""What a worker finds out about its machine."""

from __future__ import annotations

from pathlib import Path

from raycore.node import resources as host


def test_this_machine_has_cores_and_memory() -> None:
    assert host.usable_cores() >= 1
    assert host.available_memory_bytes() > 0
    host.keep_freed_memory()


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    assert host.cgroup_available(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert host.cgroup_available(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert host.cgroup_available(tmp_path) == 300
