"""A profile of an engine's own time in each step, as a file in Chrome's trace format, which Perfetto shows.

The workers' profiles are in `raycore.worker.worker_profile`. Times in both are on the same clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raycore.config.profiler import ProfilerConfig
from raycore.executor.base import Executor
from raycore.messages import StepPlan, StepResult
from raycore.profile_session import COMPRESSION_LEVEL, ProfileSession, RecordedParts
from raycore.rpc.pending import Callback, PendingCall
from raycore.system import os, threading, time

_EPOCH_S = 7_889_238
"""Torch's traces count from a multiple of this many seconds. With the same origin, files can be shown together."""


class EngineProfile:
    """Records when an engine plans, sends, waits for, and applies steps. Call its methods on the engine's thread."""

    def __init__(self, name: str, executor: Executor) -> None:
        """`name`: the engine's name in file names, such as `dp0_engine`."""
        self._name = name
        self._executor = executor
        self._parts: list[tuple[object, Mapping[str, str]]] = []
        self._recorded: RecordedParts | None = None
        self._events: list[tuple[str, int, int]] = []
        """(name, start, end) of each recorded call, in nanoseconds of `time.perf_counter_ns()`."""
        self._path = Path()
        self._session = ProfileSession(self._begin, self._end, name, "trace")

    @property
    def is_open(self) -> bool:
        """Whether a profile was started and has not ended."""
        return self._session.is_open

    def add(self, owner: object, **names: str) -> None:
        """Record calls of methods of `owner` in later profiles: the method's name, and its name in profiles."""
        self._parts.append((owner, names))

    def start(self, config: ProfilerConfig, prefix: str | None) -> None:
        """Start a profile.

        Raises:
            InvalidInput: a profile is running.
            OSError: the file can't be created.
        """
        self._session.start(config, prefix)
        self._stop_counting()  # of a profile that has ended by itself
        execute = self._executor.execute

        def counted(plan: StepPlan) -> PendingCall[StepResult]:
            self._session.next_step()
            if not self._session.is_open:
                self._stop_counting()
            if self._recorded is None:
                return execute(plan)
            with self._record("execute"):
                return _RecordedStep(execute(plan), self)

        self._executor.execute = counted

    def stop(self) -> Path | None:
        """End the profile. Returns the path of its file; None if no profile is running, or no step was recorded."""
        self._stop_counting()
        return self._session.stop()

    def record_wait(self, step: PendingCall[StepResult], timeout_s: float | None) -> StepResult:
        """Wait for a step's result, and record how long that takes."""
        with self._record("wait"):
            return step.result(timeout_s)

    def _stop_counting(self) -> None:
        vars(self._executor).pop("execute", None)

    def _begin(self, path: Path) -> None:
        self._path = path
        self._events = []
        self._recorded = RecordedParts(self._parts, self._record)

    def _end(self) -> None:
        assert self._recorded is not None
        self._recorded.restore()
        self._recorded = None
        text = json.dumps(self._trace()).encode()
        self._path.write_bytes(gzip.compress(text, COMPRESSION_LEVEL) if self._path.suffix == ".gz" else text)
        self._events = []

    @contextmanager
    def _record(self, name: str) -> Generator[None, None, None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._events.append((name, start_ns, time.perf_counter_ns()))

    def _trace(self) -> dict[str, Any]:
        pid, tid = os.getpid(), threading.get_native_id()
        origin_ns = int(time.time()) // _EPOCH_S * _EPOCH_S * 10**9
        shift_ns = time.time_ns() - time.perf_counter_ns() - origin_ns
        of_thread = {"pid": pid, "tid": tid}
        names: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", **of_thread, "args": {"name": self._name}},
            {"ph": "M", "name": "thread_name", **of_thread, "args": {"name": "engine loop"}},
        ]
        calls = [
            {"ph": "X", "name": name, **of_thread, "ts": (start + shift_ns) / 1000, "dur": (end - start) / 1000}
            for name, start, end in self._events
        ]
        return {"traceEvents": names + calls, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}


class _RecordedStep:
    """A pending step. Records how long the engine waits for it."""

    def __init__(self, step: PendingCall[StepResult], profile: EngineProfile) -> None:
        self._step = step
        self._profile = profile

    def done(self) -> bool:
        return self._step.done()

    def add_done_callback(self, callback: Callback) -> None:
        self._step.add_done_callback(lambda step: callback(self))

    def result(self, timeout: float | None = None) -> StepResult:
        return self._profile.record_wait(self._step, timeout)
