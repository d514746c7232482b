"""The Ray actor by which an engine is found and reached from other processes of its cluster.

An engine's ranks are supervised by the program that started it, which isn't an actor. So that program leaves word of
its ranks here, and asks, in calls that last, for commands that others have left. Encoded messages pass through
unopened, and what they need is all that is imported: this process lives as long as the engine does.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import os
import threading
import time

import ray

_POLL_INTERVAL_S = 1.0
"""Waiting threads look up so often; what they wait for wakes them at once."""

_SILENCE_S = 10.0
"""So long after its time the program's next call is taken for one that won't come."""


@ray.remote(  # pyright: ignore[reportCallIssue, reportUntypedClassDecorator]
    num_cpus=0, max_restarts=0, concurrency_groups={"poll": 1, "publish": 1, "status": 2, "command": 4}
)
class EngineControl:
    """A letter box between one engine's program and everybody else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._status: bytes | None = None
        self._ids = itertools.count()
        self._commands: dict[int, bytes] = {}
        """Those that the program has yet to take, in the order in which they came."""
        self._outcomes: dict[int, bytes | None] = {}
        """Of the commands that somebody waits for; None until it is known."""
        self._due_s = time.monotonic()
        """When the program's next call is to be expected at the latest."""

    def __repr__(self) -> str:
        return self._name

    # ---- the program's side

    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    @ray.method(concurrency_group="publish")
    def publish(self, status: bytes) -> None:
        """Keep an encoded `EngineStatus` for whoever asks."""
        self._status = status

    @ray.method(concurrency_group="poll")
    def next_command(self, timeout_s: float) -> tuple[int, bytes] | None:
        """A command's number and itself, encoded; None if none comes within `timeout_s`."""
        with self._changed:
            deadline_s = self._due_s = time.monotonic() + timeout_s
            while not self._commands and time.monotonic() < deadline_s:
                self._changed.wait(min(_POLL_INTERVAL_S, max(0.0, deadline_s - time.monotonic())))
            self._due_s = time.monotonic()
            if not self._commands:
                return None
            number = next(iter(self._commands))
            return number, self._commands.pop(number)

    @ray.method(concurrency_group="publish")
    def finish(self, number: int, outcome: bytes, status: bytes) -> None:
        """What a command has led to: its encoded `Outcome`, and the engine's status after it."""
        self._status = status
        with self._changed:
            if number in self._outcomes:
                self._outcomes[number] = outcome
                self._changed.notify_all()

    # ---- everybody else's

    @ray.method(concurrency_group="status")
    def status(self) -> tuple[bytes | None, bool]:
        """The encoded `EngineStatus`, None before there is one, and whether the program still asks for commands."""
        return self._status, not self._is_silent()

    @ray.method(concurrency_group="command")
    def execute(self, command: bytes) -> bytes | None:
        """Have the program do what an encoded command says. Returns its encoded `Outcome`.

        None if the program doesn't ask for commands, or not any more; one that it has taken it may still execute.
        """
        number = next(self._ids)
        with self._changed:
            self._commands[number], self._outcomes[number] = command, None
            self._changed.notify_all()
            while self._outcomes[number] is None and not self._is_silent():
                self._changed.wait(_POLL_INTERVAL_S)
            self._commands.pop(number, None)
            return self._outcomes.pop(number)

    def _is_silent(self) -> bool:
        return time.monotonic() > self._due_s + _SILENCE_S
