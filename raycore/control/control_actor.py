"""The Ray actor through which other processes of the cluster find and reach an engine.

The program that starts an engine supervises its ranks, and it isn't an actor. It publishes the ranks' status here and
long-polls for commands from other processes. Messages pass through without being decoded, and imports are kept few:
this process lives as long as the engine.
"""

from __future__ import annotations

import itertools
import os
import threading
import time

from raycore.ray_api import actor_class, endpoint

_POLL_INTERVAL_S = 1.0
"""Waiting threads check the clock at this interval; a notification wakes them at once."""

_SILENCE_S = 10.0
"""Grace period after which a missed poll means that the program is gone."""


class EngineControl:
    """A mailbox between one engine's program and other processes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._status: bytes | None = None
        self._ids = itertools.count()
        self._commands: dict[int, bytes] = {}
        """Commands that the program has yet to take, by number, oldest first."""
        self._outcomes: dict[int, bytes | None] = {}
        """Outcomes of the commands whose callers wait, by number; None until known."""
        self._due_s = time.monotonic()
        """When the program's next call is due at the latest."""

    def __repr__(self) -> str:
        return self._name

    # ---- called by the engine's program

    @endpoint()
    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    @endpoint("publish")
    def publish(self, status: bytes) -> None:
        """Store the program's encoded `EngineStatus`."""
        self._status = status

    @endpoint("poll")
    def next_command(self, timeout_s: float) -> tuple[int, bytes] | None:
        """The next command as (number, encoded command); None if none arrives within `timeout_s`."""
        with self._changed:
            deadline_s = self._due_s = time.monotonic() + timeout_s
            while not self._commands and time.monotonic() < deadline_s:
                self._changed.wait(min(_POLL_INTERVAL_S, max(0.0, deadline_s - time.monotonic())))
            self._due_s = time.monotonic()
            if not self._commands:
                return None
            number = next(iter(self._commands))
            return number, self._commands.pop(number)

    @endpoint("publish")
    def finish(self, number: int, outcome: bytes, status: bytes) -> None:
        """Store a command's encoded `Outcome`, and the engine's status after it."""
        self._status = status
        with self._changed:
            if number in self._outcomes:
                self._outcomes[number] = outcome
                self._changed.notify_all()

    # ---- called by other processes

    @endpoint("status")
    def status(self) -> tuple[bytes | None, bool]:
        """(encoded `EngineStatus`, None before the first; whether the program still polls for commands)."""
        return self._status, not self._is_silent()

    @endpoint("command")
    def execute(self, command: bytes) -> bytes | None:
        """Have the program execute an encoded command. Returns its encoded `Outcome`.

        None if the program doesn't poll, or stops polling. A command that it has already taken may still be executed.
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


ENGINE_CONTROL = actor_class(
    EngineControl, num_cpus=0, concurrency_groups={"poll": 1, "publish": 1, "status": 2, "command": 4}
)
"""What Ray starts."""
