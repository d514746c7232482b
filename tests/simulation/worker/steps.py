"""When workers have computed tokens: for those who judge whether a pause is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from simulation.world import kernel

_NUM_TRIALS, _SHARE_OF_TRIALS = 8, 1 / 8
"""How often drafts may be tried that don't pay: for each number of requests, and again now and then."""


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


def note_vain_drafting() -> None:
    """Note that a worker drafts though that takes longer than the tokens that it may save."""
    world = kernel.the_world
    if world is not None and world.current is not None:
        _vain_draftings_of(world)[world.current.process] += 1


def too_many_drafts(world: kernel.World) -> Iterator[str]:
    """The processes that draft much more often than to find out that it doesn't pay."""
    for process, count in _vain_draftings_of(world).items():
        num_steps = sum(step.process is process for step in steps_of(world))
        if count > _NUM_TRIALS + _SHARE_OF_TRIALS * num_steps:
            yield f"{process} has drafted {count} times in {num_steps} steps, though drafts don't pay"


def _vain_draftings_of(world: kernel.World) -> Counter[kernel.Process]:
    return world.systems.setdefault("vain draftings", Counter())


def drafts_of(world: kernel.World) -> dict[kernel.Process, Counter[str]]:
    """By process, what its worker has found of drafts."""
    return world.systems.setdefault("drafts", {})
