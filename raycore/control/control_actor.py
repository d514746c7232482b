"""The Ray actor through which other processes of the cluster find and reach an engine.

The program that created an engine supervises the ranks. Other processes can't call this program, because it isn't an
actor. So the program publishes the engine's status to the control actor, and long-polls the actor for commands from
other processes. The actor passes messages on without decoding them. It imports little, because its process lives as
long as the engine.
"""

from __future__ import annotations

import itertools

from raycore.ray_api import actor_class, end_with_raylet, endpoint, title_process
from raycore.system import os, threading, time

_POLL_INTERVAL_S = 1.0
"""Interval, in seconds, at which waiting threads check the clock. A notification wakes them at once."""

_SILENCE_S = 10.0
"""If the program's next poll is this many seconds late, the program is taken to have ended."""


class EngineControl:
    """A mailbox between one engine's program and other processes."""

    def __init__(self, name: str, status: bytes) -> None:
        self._name = name
        title_process(name)
        end_with_raylet()
        self._status = status
        self._changed = threading.Condition()
        self._ids = itertools.count()
        self._commands: dict[int, bytes] = {}
        """Commands that the program has yet to take, by number, oldest first."""
        self._outcomes: dict[int, bytes | None] = {}
        """Outcomes of the commands whose callers wait, by number; None until known."""
        self._due_s = time.monotonic()
        """The time by which the program has to poll again."""

    def __repr__(self) -> str:
        return self._name

    # ---- called by the engine's program

    @endpoint()
    def pid(self) -> int:
        """The id of the process in which this actor runs."""
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
        """Store the encoded `CommandOutcome` of a command, and the encoded `EngineStatus` after the command."""
        self._status = status
        with self._changed:
            if number in self._outcomes:
                self._outcomes[number] = outcome
                self._changed.notify_all()

    # ---- called by other processes

    @endpoint("status")
    def status(self) -> tuple[bytes, bool]:
        """(the last encoded `EngineStatus`; whether the program polls for commands)."""
        return self._status, not self._is_silent()

    @endpoint("command")
    def execute(self, command: bytes) -> bytes | None:
        """Have the program execute an encoded command. Returns the command's encoded `CommandOutcome`.

        Returns None if the program doesn't poll, or stops polling. If the program has already taken the command, it may
        still execute it.
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
"""The Ray actor class."""
