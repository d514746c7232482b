"""Programs in sessions of their own, with everything that they start, for tests of how they end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from waiting import LONG_S, eventually

from raycore.node.processes import send_signal

START_S = 100.0
"""A program is up well before, on a machine that does nothing else."""

_ENVIRONMENT = {
    "RAY_ADDRESS": "local",
    # torch's workers warn, late, where names of hosts can't be resolved
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

_TICKS = os.sysconf("SC_CLK_TCK")
_ESTABLISHED = "01"


class Program:
    """A program that prints `mark` when it is up. To be closed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        terminal: int | None = None,
        has_input: bool = False,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            terminal: file descriptor of its controlling terminal, to which it prints; None: it has none, and what it
                prints is `output`.
            has_input: give it a standard input, which `end_input()` ends.
        """
        self._mark = uuid.uuid4().hex
        self._known: dict[int, int] = {}
        """Processes that were seen, by pid: when they started."""
        self._cpu_s: dict[int, float] = {}
        self._lines: list[str] = []
        self._is_changed = threading.Condition()
        printed, pipe = os.pipe()
        output = pipe if terminal is None else terminal
        no_terminal = subprocess.PIPE if has_input else subprocess.DEVNULL

        def prepare() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
            if terminal is not None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=no_terminal if terminal is None else terminal,
            stdout=output,
            stderr=output,
            env=os.environ | _ENVIRONMENT | {"RAYCORE_TEST_MARK": self._mark} | (environment or {}),
            start_new_session=True,
            preexec_fn=prepare,
        )
        os.close(pipe)
        self._reader = threading.Thread(target=self._read, args=(printed,), daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """What it has printed, to standard output and standard error."""
        with self._is_changed:
            return "".join(self._lines)

    def wait_for(self, mark: str) -> None:
        """Wait until it has printed `mark`."""
        with self._is_changed:
            found = self._is_changed.wait_for(lambda: any(mark in line for line in self._lines), START_S)
        assert found, self.output

    def wait_for_process(self, mark: str) -> None:
        """Wait until one of its processes has `mark` in its command line."""
        eventually(
            lambda: any(mark in line for line in self.living().values()), lambda: f"{self.living()}\n{self.output}"
        )

    def end_input(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_for_exit(self, timeout_s: float) -> int:
        """Its exit status."""

        def has_ended() -> bool:
            self.living()
            return self.process.poll() is not None

        eventually(has_ended, lambda: f"it runs after {timeout_s} s: {self.living()}\n{self.output}", timeout_s)
        return self.process.returncode

    def wait_until_nothing_is_left(self, timeout_s: float) -> None:
        """None of its processes runs any more."""
        eventually(lambda: not self.living(), lambda: f"left after {timeout_s} s: {self.living()}", timeout_s)
        self._reader.join(timeout_s)  # all that they have printed is there

    def living(self) -> dict[int, str]:
        """Its processes, those whose parents have ended too, with their command lines."""
        found: dict[int, tuple[int, int, float]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if fields[0] not in "ZX":
                    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
                    found[int(entry.name)] = int(fields[1]), int(fields[19]), cpu_s
        mine = {pid for pid, (_, start, _) in found.items() if self._known.get(pid) == start or self._is_marked(pid)}
        while more := {pid for pid, (parent, _, _) in found.items() if parent in mine} - mine:
            mine |= more
        self._known |= {pid: found[pid][1] for pid in mine}
        self._cpu_s |= {pid: found[pid][2] for pid in mine}
        return {pid: _command_line(pid) for pid in sorted(mine)}

    @property
    def cpu_s(self) -> float:
        """CPU time that its processes have taken so far, as far as they were looked at."""
        return sum(self._cpu_s.values())

    def close(self) -> None:
        """End all of it."""
        send_signal(self.living(), signal.SIGKILL)
        self.process.wait(LONG_S)
        self._reader.join(LONG_S)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, errors="replace") as file:
            for line in file:
                with self._is_changed:
                    self._lines.append(line)
                    self._is_changed.notify_all()

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def raycore(*arguments: str) -> list[str]:
    """The command line of `raycore`."""
    return [sys.executable, "-m", "raycore", "--log-level", "info", *arguments]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    except OSError:
        return ""


def num_connections(pid: int, port: int) -> int:
    """Connections to `port` that a process has accepted."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(
        f"socket:[{row[9]}]" in inodes
        for row in rows
        if row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port
    )
