"""Messages between an engine's program and the processes that scale the engine, and the names of control actors."""

from __future__ import annotations

import msgspec

NAMESPACE = "raycore"
"""The Ray namespace of the engines' control actors."""

ACTOR_PREFIX = "engine-"
"""A control actor's name is this prefix and the engine's name."""


class ScaleCommand(msgspec.Struct, frozen=True):
    """A command to change the number of ranks; see `LLM.scale`."""

    data_parallel_size: int
    drain_timeout_s: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The result of a command."""

    error: str | None = None
    """Why the command was refused or failed; None if it succeeded."""
