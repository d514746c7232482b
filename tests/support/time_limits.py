"""A pytest plugin: what passes its time limit ends and is named, whatever it waits in, and the run goes on.

pytest-timeout fails a test at its limit by a signal, which has no effect before the main thread executes Python code
again, and none on what comes after the failure: fixtures, exit hooks, other threads. So each pytest process has another
process (`process_killer.py`) that kills it if a test hasn't ended some time after its limit, or the process after the
last test. With pytest-xdist, the test has then failed, and a new worker runs the rest of its file.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import suppress
from uuid import uuid4

import process_killer
import pytest
from pytest_timeout import is_debugging
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import NodeManager, WorkerController


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("timeout_grace_s", "how long a test's fixtures may take to end after its time limit", default="60")
    parser.addini("timeout_end_s", "how long a process may take to end after its last test", default="60")


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":
        config.pluginmanager.register(TimeLimits(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class TimeLimits:
    """Tells the process that kills this one what has begun."""

    def __init__(self, config: pytest.Config) -> None:
        worker = getattr(config, "workerinput", None)
        self._is_worker = worker is not None
        self._name = f"pytest's process {worker['workerid'] if worker else os.getpid()}"
        self._end_s = float(config.getini("timeout_end_s"))
        NodeManager.EXIT_TIMEOUT = 3 * self._end_s  # else pytest-xdist kills workers without a word
        self._grace_s = float(config.getini("timeout_grace_s"))
        mark = uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != process_killer.VARIABLE}
        os.environ[process_killer.VARIABLE] = mark
        self._stderr = os.fdopen(os.dup(2), "wb", buffering=0)  # tests' output is captured
        killer = subprocess.Popen(
            [sys.executable, "-I", "-S", process_killer.__file__, str(os.getpid()), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # it outlives this process, even if a key ends that
        )
        assert killer.stdin is not None
        self._messages = killer.stdin
        faulthandler.register(process_killer.SHOW_STACKS, file=self._stderr, all_threads=True, chain=True)
        os.register_at_fork(after_in_child=self._tell_of_fork)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings) -> None:
        if not is_debugging():
            self._send(f"limit {settings.timeout + self._grace_s} {item.nodeid}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._send("no limit")

    def pytest_enter_pdb(self) -> None:
        self._send("no limit")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if self._is_worker:  # it waits for the other workers first
                threading._register_atexit(self._begin_end)
            else:
                self._begin_end()

    def _begin_end(self) -> None:
        self._send(f"ending {self._end_s} {self._name}")

    def _tell_of_fork(self) -> None:
        with suppress(OSError):
            self._send(f"forked {os.getpid()}")

    def _send(self, message: str) -> None:
        os.write(self._messages.fileno(), f"{message}\n".encode())


class FileScheduling(LoadFileScheduling):
    """Lets a run go on after workers have died. Without what is changed here, it stands still, or fails."""

    def remove_node(self, node: WorkerController) -> str | None:
        # if the test in which a worker died ran again, it would end each worker in turn
        files = self.assigned_work[node]
        running = next((name for tests in files.values() for name, is_done in tests.items() if not is_done), None)
        if running is not None:
            files[self._split_scope(running)][running] = True
        # a worker that gets a file without tests to run is never given another
        self.assigned_work[node] = {name: tests for name, tests in files.items() if not all(tests.values())}
        super().remove_node(node)
        return running

    def schedule(self) -> None:
        super().schedule()
        super().schedule()  # a worker begins a test when it knows the one after it, which may be in another file

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # others are new, and collect the tests
            super()._reschedule(node)
