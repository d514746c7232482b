"""What workers have seen that none may see, for the judges of a run."""

from __future__ import annotations

from simulation.world import kernel
from simulation.world.kernel import World

_DISAGREEMENTS, _FAILURES = "disagreements of workers", "failures of workers"


def disagrees(text: str) -> None:
    """Note that workers differ that mustn't, whatever has happened."""
    _note(_DISAGREEMENTS, text)


def fails(text: str) -> None:
    """Note that a worker can't go on, which is the product's fault if nothing was broken before."""
    _note(_FAILURES, text)


def disagreements(world: World) -> list[str]:
    return [text for _, text in world.systems.get(_DISAGREEMENTS, [])]


def failures(world: World, until_s: float) -> list[str]:
    """Those from before this time."""
    return [text for at_s, text in world.systems.get(_FAILURES, []) if at_s < until_s]


def _note(kind: str, text: str) -> None:
    world = kernel.the_world
    if world is not None:
        world.tell(text)
        world.systems.setdefault(kind, []).append((world.now_s, text))
