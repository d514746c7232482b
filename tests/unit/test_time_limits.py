"""What ends the tests that hang, and pytest's processes: tests/support/time_limits.py."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from time_limits import FileScheduling
from xdist.remote import Producer

SUPPORT = Path(__file__).parents[1] / "support"
FILES = ["a.py::1", "a.py::2", "a.py::3", "b.py::1", "c.py::1"]
PLUGINS = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist", "-p", "time_limits"]
LONG_S = 1000

HANGING = {
    "a_call_in_c_with_signals_blocked": """
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        ctypes.CDLL(None).pause()""",
    "a_call_in_c_with_the_interpreter_lock": """
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        ctypes.PyDLL(None).pause()""",
    "the_end_of_a_thread_pool": """
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    with ThreadPoolExecutor() as pool:
        pool.submit(threading.Event().wait)""",
    "a_lock": """
    lock = threading.Lock()
    while True:
        with contextlib.suppress(BaseException):
            lock.acquire()""",
    "a_process_after_the_failure": """
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    try:
        process.wait()
    finally:
        process.wait()""",
    "a_fork_after_the_failure": """
    fork = os.fork()
    if not fork:
        hang()
    try:
        hang()
    finally:
        os.waitpid(fork, 0)""",
    "a_fixture": """
    request.addfinalizer(hang)""",
}
"""The body of a test, by what it waits in."""

PROGRAM = """
import contextlib, ctypes, os, pathlib, pytest, signal, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor

def hang():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        signal.pause()

def test_before():
    pass

@pytest.mark.timeout(1)
def test_hangs_in_{name}(request):
{body}

def test_after():
    pass
"""


def run_pytest(directory: Path, *arguments: str) -> tuple[int, str]:
    """Its exit status, and all that it wrote."""
    (directory / "pytest.ini").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *arguments, "."],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # others take seconds
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG_S,
    )
    return done.returncode, done.stdout


@pytest.mark.timeout(LONG_S)
def test_a_test_that_hangs_is_named_and_the_others_run(tmp_path):
    for name, body in HANGING.items():
        (tmp_path / f"test_{name}.py").write_text(PROGRAM.format(name=name, body=body))
    status, output = run_pytest(tmp_path, "-n", "3", "--dist", "loadfile", "-o", "timeout_grace_s=1", "-rA")
    for name in HANGING:
        assert f"PASSED test_{name}.py::test_before" in output
        assert f"FAILED test_{name}.py::test_hangs_in_{name}" in output
        assert f"PASSED test_{name}.py::test_after" in output
    assert "in test_hangs_in_a_lock" in output, "its stack wasn't shown"
    assert status == pytest.ExitCode.TESTS_FAILED


@pytest.mark.timeout(LONG_S)
def test_nothing_is_left_of_a_worker_that_dies(tmp_path):
    """The run goes on, even though a fork of the worker holds its pipe open, and its children have other sessions."""
    (tmp_path / "test_dies.py").write_text(
        PROGRAM.format(
            name="nothing",
            body="""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    fork = os.fork()
    if not fork:
        hang()
    pathlib.Path("pids").write_text(f"{process.pid} {fork}")
    os.kill(os.getpid(), signal.SIGKILL)""",
        )
    )
    _, output = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile")
    assert "1 failed, 2 passed" in output
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize(
    "hang",
    [
        "atexit.register(threading.Event().wait)",
        "threading.Thread(target=threading.Event().wait).start()",
    ],
)
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_process_that_hangs_at_its_end_is_named(tmp_path, processes, hang):
    (tmp_path / "test_exit.py").write_text(f"import atexit, threading\n\ndef test_passes():\n    {hang}\n")
    status, output = run_pytest(tmp_path, "-n", processes, "-o", "timeout_end_s=1")
    assert "1 passed" in output
    assert "has not ended within its limit" in output
    assert " in wait\n" in output, "its stack wasn't shown"
    assert processes != "0" or status != 0


@pytest.mark.timeout(LONG_S)
def test_a_process_that_waits_for_the_others_does_not_hang(tmp_path):
    (tmp_path / "test_quick.py").write_text("def test_a():\n    pass\n")
    (tmp_path / "test_slow.py").write_text("import time\n\ndef test_b():\n    time.sleep(3)\n")
    status, output = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile", "-o", "timeout_end_s=1")
    assert (status, "2 passed" in output) == (0, True), output
    assert "has not ended" not in output


class Worker:
    """What pytest-xdist knows of one."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [FILES[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling(num_workers: int) -> tuple[FileScheduling, list[Worker]]:
    """With the tests of `FILES`, which all workers have collected."""
    config = SimpleNamespace(
        getvalue={"tx": [f"{num_workers}*popen"]}.get, option=SimpleNamespace(loadscopereorder=False)
    )
    schedule = FileScheduling(config, Producer("", enabled=False))
    workers = [Worker(f"gw{number}") for number in range(num_workers)]
    for worker in workers:
        schedule.add_node(worker)
        schedule.add_node_collection(worker, FILES)
    schedule.schedule()
    return schedule, workers


def add_worker(schedule: FileScheduling) -> Worker:
    worker = Worker("new")
    schedule.add_node(worker)
    schedule.add_node_collection(worker, FILES)
    schedule.schedule()
    return worker


def test_the_test_in_which_a_worker_died_is_not_run_again():
    schedule, [worker] = scheduling(num_workers=1)
    schedule.mark_test_complete(worker, FILES.index("a.py::1"))
    assert schedule.remove_node(worker) == "a.py::2"
    assert sorted(add_worker(schedule).given) == ["a.py::3", "c.py::1"], "the other file comes later"


def test_a_new_worker_gets_two_tests_if_files_have_one():
    """It begins none before it has the next one."""
    schedule, [worker] = scheduling(num_workers=1)
    for name in ("a.py::1", "a.py::2"):
        schedule.mark_test_complete(worker, FILES.index(name))
    assert schedule.remove_node(worker) == "a.py::3"
    assert add_worker(schedule).given == ["b.py::1", "c.py::1"]


def test_a_new_worker_gets_no_tests_before_it_has_collected_them():
    schedule, workers = scheduling(num_workers=2)
    for worker in workers:
        schedule.remove_node(worker)
    slow = Worker("slow")
    schedule.add_node(slow)
    assert add_worker(schedule).given
    assert slow.given == []
