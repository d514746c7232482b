"""What is shown of a dead process's log. Ray's state API is replaced."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util.state

from raycore.cluster import logs
from raycore.cluster.logs import clean, read_log, with_last_lines


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This node's folder of logs; the node is called `here`."""
    context = SimpleNamespace(
        gcs_address="10.0.0.1:6379",
        get_node_id=lambda: "here",
        get_temp_dir=lambda: str(tmp_path),
        get_session_name=lambda: "session_1",
    )
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    folder = tmp_path / "session_1" / "logs"
    folder.mkdir(parents=True)
    return folder


def fake_get_log(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], Iterator[str]]) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def get_log(**options: Any) -> Iterator[str]:
        asked.append(options)
        return answer(options["suffix"])

    monkeypatch.setattr(ray.util.state, "get_log", get_log)
    return asked


def test_the_additions_of_ray_and_terminals_are_left_out_of_last_lines():
    text = (
        ":job_id:01000000\n:actor_name:raycore_dp0\n\n\x1b[36m(pid=7)\x1b[0m out of \x1b[1;31mmemory\x1b[0m  \r\n"
        "  5%|#\r 50%|#####\r100%|##########\n:task_name:run\n  File 'a.py'\nno line end"
    )
    assert clean(text) == ["(pid=7) out of memory", "100%|##########", "  File 'a.py'", "no line end"]


def test_last_lines_are_limited_in_number_and_length():
    lines = clean("\n".join(f"line {i}" for i in range(1000)) + "\n" + "x" * 10_000)
    assert lines[:-1] == [f"line {i}" for i in range(981, 1000)]
    assert lines[-1] == "x" * 300 + "…"


def test_last_lines_are_read_from_the_end_of_the_processs_own_file(tmp_path: Path):
    (tmp_path / "worker-ab-01000000-47.err").write_bytes(b"early\n" + b"." * 200_000 + b"\n\xff late\n")
    (tmp_path / "worker-ab-01000000-47.out").write_text("progress\n")
    (tmp_path / "worker-ab-01000000-147.err").write_text("another's\n")
    (tmp_path / "python-core-worker-ab-47.err").write_text("not what it wrote\n")
    assert read_log(tmp_path, 47)[1:] == ["� late"]
    assert read_log(tmp_path, 7) == []


def test_standard_output_is_shown_where_standard_error_is_empty(tmp_path: Path):
    (tmp_path / "worker-ab-01000000-47.err").write_text(":job_id:01000000\n")
    (tmp_path / "worker-ab-01000000-47.out").write_text("printed\n")
    assert read_log(tmp_path, 47) == ["printed"]


def test_of_two_processes_with_one_pid_the_later_ones_log_is_read(tmp_path: Path):
    for name, written_s in (("worker-b-01-47.err", 100), ("worker-a-01-47.err", 200)):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (written_s, written_s))
    assert read_log(tmp_path, 47) == ["worker-a-01-47.err"]


def test_a_cause_is_followed_by_the_last_lines(session: Path):
    (session / "worker-ab-01000000-47.err").write_text("first\nsecond\n")
    assert with_last_lines("it died", 47, "here") == "it died\nThe last lines of process 47:\n    first\n    second"


@pytest.mark.parametrize(("pid", "node"), [(None, "here"), (47, None), (48, "here")])
def test_a_cause_without_a_log_is_unchanged(session: Path, pid: int | None, node: str | None):
    assert with_last_lines("it died", pid, node) == "it died"


def test_last_lines_of_another_node_are_read_by_rays_state_api(session: Path, monkeypatch: pytest.MonkeyPatch):
    (session / "worker-ab-01000000-47.err").write_text("this node's\n")
    asked = fake_get_log(
        monkeypatch, lambda suffix: iter([":job_id:01\n", "from a", "far\n"] if suffix == "out" else [])
    )
    assert with_last_lines("it died", 47, "there").splitlines()[1:] == [
        "The last lines of process 47:",
        "    from afar",
    ]
    process = {"address": "10.0.0.1:6379", "node_id": "there", "pid": 47}
    assert [options["suffix"] for options in asked] == ["err", "out"]
    assert all(process.items() <= options.items() for options in asked)


def test_a_failing_state_api_leaves_out_only_the_last_lines(session: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(suffix: str) -> Iterator[str]:
        raise ConnectionError("no dashboard")

    fake_get_log(monkeypatch, fail)
    assert with_last_lines("it died", 47, "there") == "it died"


def test_a_state_api_that_hangs_is_not_waited_for(session: Path, monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()

    def hang(suffix: str) -> Iterator[str]:
        over.wait()
        yield "late"

    fake_get_log(monkeypatch, hang)
    monkeypatch.setattr(logs, "_TIMEOUT_S", 0.1)
    try:
        assert with_last_lines("it died", 47, "there") == "it died"
    finally:
        over.set()


def test_a_cause_has_no_last_lines_if_ray_is_not_initialized(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert with_last_lines("it died", 47, "here") == "it died"


@pytest.mark.parametrize(
    ("free", "node_id", "is_told"), [(0, "here", True), (1 << 20, "here", False), (0, "there", False), (0, None, False)]
)
def test_a_full_disk_of_this_node_comes_before_the_cause(
    session: Path, monkeypatch: pytest.MonkeyPatch, free: int, node_id: str | None, is_told: bool
):
    monkeypatch.setattr(logs, "free_bytes", lambda path: free)
    monkeypatch.setattr(logs, "room_of", lambda path: ": 0 MiB are free")
    told = with_last_lines("it died", None, node_id)
    assert told == (f"{session.parents[1]} is full: 0 MiB are free. it died" if is_told else "it died")
