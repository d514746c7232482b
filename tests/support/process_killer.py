"""Kills a pytest process that passes a time limit, and all that it started. `time_limits.py` runs this script.

Standard input has one message per line:

* `limit SECONDS NAME`: NAME has begun, and has this many seconds.
* `ending SECONDS NAME`: the same, and then the process ends by itself.
* `no limit`: NAME is done.
* `forked PID`: a child which runs no other program.

A process that runs another program is found by the environment variable `VARIABLE`, whoever started it, and in whatever
session and process group it is.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "PYTEST_PROCESS"
"""Its value is different for each pytest process."""

SHOW_STACKS = signal.SIGUSR2
"""Has the process write the stacks of its threads, and end."""

_STACKS_S = 10.0
_FORKS_S = 10.0
_POLL_INTERVAL_S = 0.1
_MAX_MESSAGE_BYTES = 1 << 16


class ProcessKiller:
    """Kills process `pid`, and those with `mark` as the variable's value, once a limit has passed."""

    def __init__(self, pid: int, mark: str) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._mark = f"{VARIABLE}={mark}".encode()
        self._forks: set[int] = set()  # pidfds
        self._unread = b""
        self._name: str | None = None
        self._deadline_s: float | None = None
        self._is_ending = False

    def run(self) -> None:
        """Return when the process has ended, by itself or not."""
        inputs = [self._pidfd, sys.stdin.fileno()]
        while True:
            remaining_s = None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0)
            ready = select.select([*inputs, *self._forks], [], [], remaining_s)[0]
            if not ready:
                self._show_stacks()
            if not ready or self._pidfd in ready:
                break
            for fork in self._forks.intersection(ready):
                self._forks.remove(fork)
                os.close(fork)
            if sys.stdin.fileno() in ready and not self._receive():
                inputs = [self._pidfd]  # the interpreter is nearly at its end
        if not (self._is_ending and ready):
            self._kill_all()

    def _receive(self) -> bool:
        """Read messages. False if there will be no more."""
        received = os.read(sys.stdin.fileno(), _MAX_MESSAGE_BYTES)
        *messages, self._unread = (self._unread + received).split(b"\n")
        for message in messages:
            kind, argument, *name = message.decode().split(" ", 2)
            if kind == "forked":
                with suppress(ProcessLookupError):
                    self._forks.add(os.pidfd_open(int(argument)))
            else:
                self._is_ending = kind == "ending"
                self._name = name[0] if name else None
                self._deadline_s = time.monotonic() + float(argument) if name else None
        return bool(received)

    def _show_stacks(self) -> None:
        text = f"\n{self._name} has not ended within its limit. Its process is killed. The stacks of its threads:\n"
        os.write(sys.stderr.fileno(), text.encode())
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, SHOW_STACKS)
        select.select([self._pidfd], [], [], _STACKS_S)

    def _kill_all(self) -> None:
        while True:
            for process in (self._pidfd, *self._forks):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            # each fork holds the pipe open, so the pipe's end means that there are no others
            if not select.select([sys.stdin], [], [], _FORKS_S)[0] or not self._receive():
                break
        while pids := list(self._with_mark()):  # each may have started others meanwhile
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_INTERVAL_S)

    def _with_mark(self) -> Iterator[int]:
        """Processes that run: others have no environment."""
        for directory in Path("/proc").iterdir():
            if directory.name.isdecimal():
                with suppress(OSError):
                    if self._mark in (directory / "environ").read_bytes().split(b"\0"):
                        yield int(directory.name)


if __name__ == "__main__":
    ProcessKiller(int(sys.argv[1]), sys.argv[2]).run()
