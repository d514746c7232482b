"""What the kernel says of CPU time: of this process, and from files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycore.node.cpu_time import OtherProcesses, ThreadWaits

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


def test_the_waits_of_computing_threads_are_added_up(tmp_path: Path):
    def write(thread_id: int, ran_ms: int, waited_ms: int, num_waits: int = 7) -> None:
        (tmp_path / str(thread_id)).mkdir(exist_ok=True)
        text = f"{ran_ms * 10**6} {waited_ms * 10**6} {num_waits}\n"
        (tmp_path / str(thread_id) / "schedstat").write_text(text)

    write(1, 1000, 500)
    write(2, 1000, 300)
    write(4, 8000, 100)
    waits = ThreadWaits(tmp_path)
    assert waits.new_s() == 0.0
    write(1, 1090, 600)
    write(3, 20, 50)  # a new thread
    write(4, 8008, 400)  # it waited long, but hardly runs
    assert waits.new_s() == pytest.approx(0.15)
    (tmp_path / "2" / "schedstat").unlink()  # its thread has ended
    write(3, 40, 60)
    write(1, 1190, 700, num_waits=2007)  # it woke up 2,000 times
    assert waits.new_s() == pytest.approx(0.01)


def test_threads_that_begin_to_compute_are_found(tmp_path: Path):
    """Those that don't compute are looked at more rarely."""
    waits = ThreadWaits(tmp_path)
    found: list[float] = []
    for second in range(41):
        worked_since_20 = max(0, second - 20)
        for thread_id, seconds in enumerate((second, worked_since_20)):
            (tmp_path / str(thread_id)).mkdir(exist_ok=True)
            text = f"{seconds * 10**9} {seconds * 10**8} {seconds}\n"
            (tmp_path / str(thread_id) / "schedstat").write_text(text)
        found.append(round(waits.new_s(), 3))
    assert found[1:21] == [0.1] * 20
    assert set(found[21:30]) == {0.1}
    assert found[31:] == [0.2] * 10


def test_all_threads_are_read_again_when_others_are_to_compute(tmp_path: Path):
    def write(*seconds: int) -> None:
        for thread_id, each in enumerate(seconds):
            (tmp_path / str(thread_id)).mkdir(exist_ok=True)
            (tmp_path / str(thread_id) / "schedstat").write_text(f"{each * 10**9} {each * 10**8} {each}\n")

    waits = ThreadWaits(tmp_path)
    for second in range(20):
        write(second, 0)
        waits.new_s()
    waits.read_all()
    write(20, 1)
    assert waits.new_s() == pytest.approx(0.2)


def test_thread_waits_are_zero_and_cores_unknown_without_the_proc_files(tmp_path: Path):
    assert ThreadWaits(tmp_path / "none").new_s() == 0.0
    assert OtherProcesses(tmp_path / "none").cores_used() is None


def test_a_thread_that_shares_its_core_is_seen_to_wait():
    core = min(os.sched_getaffinity(0))
    command = f"""
import os, subprocess, sys, time
from raycore.node.cpu_time import ThreadWaits
os.sched_setaffinity(0, [{core}])
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    waits, deadline_s, waited_s = ThreadWaits(), time.monotonic() + 60, 0.0
    while waited_s < 0.05 and time.monotonic() < deadline_s:
        sum(range(10_000))
        waited_s += waits.new_s()
finally:
    busy.kill()
    busy.wait()
print(waited_s >= 0.05)
"""
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=100, check=True)
    assert found.stdout.strip() == "True"


def test_the_cores_of_other_processes_are_the_busy_cores_without_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cores = sorted(os.sched_getaffinity(0))
    ticks = os.sysconf("SC_CLK_TCK")

    def write(busy_s: float, nice_ticks: int = 0) -> None:
        lines = [
            "cpu 0 0 0 0 0 0 0 0 0 0",
            *(f"cpu{core} {int(busy_s * ticks)} {nice_ticks} 0 77 8 0 0 0 5 0" for core in cores),
        ]
        (tmp_path / "stat").write_text("\n".join([*lines, "cpu9999 1 2 3 4 5 6 7 8 9 10", "intr 5 6", "ctxt 7"]))

    now_s = iter([100.0, 102.0])
    own_s = iter([1.0, 1.5])
    clock = SimpleNamespace(monotonic=lambda: next(now_s), process_time=lambda: next(own_s))
    monkeypatch.setattr("raycore.node.cpu_time.time", clock)
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)  # also if the tests run at a low one
    write(1.0)
    others = OtherProcesses(tmp_path / "stat")
    write(2.0, nice_ticks=50)
    assert others.cores_used() == pytest.approx((len(cores) * 1.0 - 0.5) / 2.0)


def test_a_computing_process_is_counted_among_the_cores_of_others():
    others = OtherProcesses()
    if others.cores_used() is None:
        pytest.skip("/proc/stat can't be read")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline_s, used = time.monotonic() + 60, 0.0
        while used < 0.2 and time.monotonic() < deadline_s:
            time.sleep(0.3)
            used = others.cores_used() or 0.0
    finally:
        busy.kill()
        busy.wait()
    assert used >= 0.2
