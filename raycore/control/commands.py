"""What travels between an engine's program and those who watch and steer it from elsewhere, and how they find it."""

from __future__ import annotations

import msgspec

NAMESPACE = "raycore"
"""The Ray namespace of the engines' control actors."""

ACTOR_PREFIX = "engine-"
"""A control actor's name is this and the engine's."""


class ScaleCommand(msgspec.Struct, frozen=True):
    """Have this many ranks: see `LLM.scale`."""

    data_parallel_size: int
    drain_timeout_s: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What became of a command."""

    error: str | None = None
    """Why it was refused or has failed; None if it was done."""
