"""The end of a process that holds a lifeline is seen, however it ends, and nothing else is taken for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from waiting import LONG_S

from raycore.node.lifeline import LifelineWatch

PROCESS = """
import sys
from raycore.node import lifeline

lifeline.lock()
lifeline.lock()
print(flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes are found through /proc")


@contextmanager
def running(code: str = PROCESS) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lifeline_of_a_killed_process_reports_its_end(number: signal.Signals):
    ended, twice = threading.Event(), threading.Event()
    with running() as process:
        assert LifelineWatch.start(process.pid, ended.set) is not None
        assert LifelineWatch.start(process.pid, twice.set) is not None
        assert not ended.wait(1.5), "it lives: longer than a watch waits at a time"
        process.send_signal(number)
        assert ended.wait(LONG_S)
        assert twice.wait(LONG_S), "every watch sees it"


def test_the_lifeline_of_a_process_that_exits_reports_its_end():
    ended = threading.Event()
    with running() as process:
        assert LifelineWatch.start(process.pid, ended.set) is not None
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert ended.wait(LONG_S)


def test_the_lifeline_of_a_stopped_process_reports_no_end():
    ended = threading.Event()
    with running() as process:
        assert LifelineWatch.start(process.pid, ended.set) is not None
        process.send_signal(signal.SIGSTOP)
        assert not ended.wait(0.3)
        process.kill()
        assert ended.wait(LONG_S), "stopped processes can be killed"


def test_a_closed_lifeline_watch_reports_no_end():
    ended = threading.Event()
    with running() as process:
        watch = LifelineWatch.start(process.pid, ended.set)
        assert watch is not None
        watch.close()
    assert not ended.wait(0.3)


def test_a_process_without_a_lifeline_is_not_watched():
    with running("print(flush=True); input()") as process:
        assert LifelineWatch.start(process.pid, lambda: None) is None
    assert LifelineWatch.start(process.pid, lambda: None) is None, "it is gone"
