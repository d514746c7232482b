"""Messages between an engine's program and the processes that control the engine, and the names of control actors."""

from __future__ import annotations

from typing import Any

import msgspec

NAMESPACE = "raycore"
"""The Ray namespace of the engines' control actors."""

ACTOR_PREFIX = "engine-"
"""A control actor's name is this prefix and the engine's name."""


class CallCommand(msgspec.Struct, frozen=True):
    """A command to make a call on the engine, one of `calls.REMOTE_CALLS`."""

    method: str
    arguments: dict[str, Any]


class CommandOutcome(msgspec.Struct, frozen=True):
    """The result of a command."""

    error: str | None = None
    """Why the command was refused or failed; None if it succeeded."""
