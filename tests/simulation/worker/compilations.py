"""When workers have begun to compile constraints: for those who judge whether anybody still wanted them."""

from __future__ import annotations

from typing import NamedTuple

from raycore.structured_outputs import StructuredOutputsParams
from simulation.world import kernel


class Compilation(NamedTuple):
    """That a worker has begun to compile a constraint."""

    process: kernel.Process
    constraint: StructuredOutputsParams
    at_s: float


def note_compilation(constraint: StructuredOutputsParams) -> None:
    """Note that the current process begins to compile."""
    world = kernel.the_world
    if world is not None and world.current is not None:
        compilations_of(world).append(Compilation(world.current.process, constraint, world.now_s))


def compilations_of(world: kernel.World) -> list[Compilation]:
    """All of a world, in order."""
    return world.systems.setdefault("compilations", [])
