"""What a worker finds out about its machine."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from own_memory import resident_bytes

from raycore.node import resources as host
from raycore.node.garbage import freeze_heap


def test_this_machine_has_cores_and_memory() -> None:
    assert host.usable_cores() >= 1
    assert 0 < host.available_memory_bytes() <= (host.total_memory_bytes() or 0)
    host.keep_freed_memory()


class Cycle:
    """Holds memory, and can only be freed by a collection."""

    def __init__(self, num_bytes: int) -> None:
        self.itself = self
        self.buffers = [ctypes.create_string_buffer(b"x" * size, size) for size in [num_bytes // 64] * 64]


def hold_and_return(num_bytes: int, on_thread: bool) -> tuple[int, int]:
    """How much more memory this process has than before while that many bytes are held, and when they are freed."""
    host.keep_freed_memory()
    before = resident_bytes()

    def allocate() -> tuple[Cycle, object]:
        # the second one is too large for a gap, so it lies above the first, and keeps the heap from shrinking
        return Cycle(num_bytes), ctypes.create_string_buffer(num_bytes // 32)

    with ThreadPoolExecutor() as pool:  # threads have heaps of their own
        cycle, kept_above = pool.submit(allocate).result() if on_thread else allocate()
    freeze_heap()
    held = resident_bytes() - before
    with host.freed_memory_returned():
        del cycle
    left = resident_bytes() - before
    del kept_above
    return held, left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("on_thread", [False, True])
def test_freed_memory_returns_to_the_operating_system(on_thread: bool) -> None:
    num_bytes = 64 << 20
    # in this process, what earlier tests have left may be freed meanwhile
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        held, left = pool.submit(hold_and_return, num_bytes, on_thread).result(timeout=60)
    assert held > 0.9 * num_bytes
    assert left < 0.1 * num_bytes


def test_the_memory_of_a_control_group_is_its_limit_and_what_is_left_of_it(tmp_path: Path) -> None:
    assert host.cgroup_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert host.cgroup_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert host.cgroup_memory(tmp_path) == (1000, 300)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_smallest_cpu_quota_of_nested_control_groups_holds(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    assert host.cgroup_cpu_quota(root, membership) is None
    membership.write_text("0::/jobs/serve\n")
    assert host.cgroup_cpu_quota(root, membership) is None
    write(root / "jobs/serve/cpu.max", "max 100000\n")
    assert host.cgroup_cpu_quota(root, membership) is None
    write(root / "jobs/cpu.max", "350000 100000\n")
    write(root / "other/cpu.max", "100000 100000\n")
    assert host.cgroup_cpu_quota(root, membership) == 3.5
    write(root / "jobs/serve/cpu.max", "100000 50000\n")
    assert host.cgroup_cpu_quota(root, membership) == 2.0


def test_a_containers_cpu_quota_is_read_from_its_root_control_group(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/\n")
    write(tmp_path / "cgroup/cpu.max", "400000 100000\n")
    assert host.cgroup_cpu_quota(tmp_path / "cgroup", tmp_path / "membership") == 4.0


def test_limits_of_control_groups_of_version_1_are_read(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("9:name=systemd:/\n2:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert host.cgroup_cpu_quota(root, membership) is None
    write(root / "cpu/cpu.cfs_quota_us", "150000\n")
    assert host.cgroup_cpu_quota(root, membership) == 1.5


def test_a_quota_leaves_at_least_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = host.usable_cores()
    for quota, expected in ((0.5, 1), (1.9, 1), (cores + 1.0, cores)):
        monkeypatch.setattr(host, "cgroup_cpu_quota", lambda quota=quota: quota)
        assert host.usable_cores() == expected
