"""When workers have computed tokens: for those who judge whether a pause is one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from simulation.world import kernel


@dataclass
class Step:
    """A step with tokens."""

    process: kernel.Process
    began_s: float
    until_s: float
    """When it was over, or its process."""


def note_step(began_s: float, until_s: float) -> None:
    """Note a step of the current process."""
    world = kernel.the_world
    if world is None or world.current is None:
        return
    step = Step(world.current.process, began_s, until_s)
    steps_of(world).append(step)
    if "_cuts_steps" not in vars(step.process):
        vars(step.process)["_cuts_steps"] = True
        step.process.on_end.append(lambda process: _cut(world, process))


def _cut(world: kernel.World, process: kernel.Process) -> None:
    for step in steps_of(world):
        if step.process is process:
            step.until_s = min(step.until_s, world.now_s)


def steps_of(world: kernel.World) -> list[Step]:
    """All steps of a world, in the order of their begin."""
    return world.systems.setdefault("steps", [])


def note_drafts(num_drafts: int, num_tokens: int, num_right: int) -> None:
    """Note what a worker has found of the drafts of a step."""
    world = kernel.the_world
    if world is not None and world.current is not None:
        found = drafts_of(world).setdefault(world.current.process, Counter())
        found.update(drafts=num_drafts, tokens=num_tokens, right=num_right)


def drafts_of(world: kernel.World) -> dict[kernel.Process, Counter[str]]:
    """By process, what its worker has found of drafts."""
    return world.systems.setdefault("drafts", {})
