"""Plays one thing in small simulated clusters: prints a line for each seed, or its story.

    python -m simulation.program ranks FIRST_SEED NUM_SEEDS    or owners, exits, raising, places, budgets, and so on
    python -m simulation.program raising 0 0 faults            puts in each fault of `FAULTS`, and says what finds it

What is played is imported by its name: the simulated Ray would take classes of the program itself along in messages,
with the path of their file.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from simulation import mistakes
from simulation.apart import Died, run_all_apart
from simulation.heard import heard
from simulation.putting_in import look_for_all
from simulation.ray.cluster import Cluster
from simulation.world.kernel import World
from simulation.world.own_state import OwnState

_LIMIT_S = 120.0
"""Real seconds that a seed may take."""
Play = Callable[[Cluster, int], object]
"""Plays with a cluster of three nodes and so many ranks. What it raises is a failure."""


class PutIn(NamedTuple):
    """A fault that can be put into the product, to show that a program finds it."""

    put_in: Callable[[], None]
    seed: int
    """One that finds it."""
    said: str
    """What its failure says."""


def run(play: Play, seed: int, *, tells: bool = False) -> World:
    """Play one seed. `tells`: print its story if it fails."""
    from simulation.cluster.anywhere import same_paths  # imported lazily: it imports some of the product

    world = World(seed, last_s=2000.0)
    cluster = Cluster(world)
    for _ in range(3):
        cluster.add_node(CPU=2)
    OwnState(world)
    try:
        with same_paths(), heard():
            world.run(lambda: play(cluster, 1 + seed % 4))
        assert not world.failures, world.failures
        assert not (found := list(mistakes.of(world))), found
    except BaseException:
        for at_s, who, what in world.story if tells else []:
            print(f"  {at_s:10.4f} {who}: {what}", flush=True)
        raise
    return world


def _digest(play: Play, seed: int, tells: bool) -> str:
    return run(play, seed, tells=tells).digest


def _found(play: Play, fault: PutIn) -> str | None:
    fault.put_in()
    try:
        run(play, fault.seed)
    except BaseException as error:
        return f"found by seed {fault.seed}: {error}" if fault.said in str(error) else None
    return None


def main() -> None:
    logging.getLogger("raycore").setLevel(logging.CRITICAL)
    program = importlib.import_module(f"simulation.{sys.argv[1]}")
    first, count = int(sys.argv[2]), int(sys.argv[3])
    works = ((seed, partial(_digest, program.main, seed, count == 1)) for seed in range(first, first + count))
    for seed, digest in run_all_apart(works, 1, _LIMIT_S):
        print(seed, f"failed: {digest.reason}" if isinstance(digest, Died) else digest, flush=True)
    if "faults" in sys.argv:
        faults: list[PutIn] = program.FAULTS
        sys.exit(look_for_all((each.put_in.__name__, partial(_found, program.main, each)) for each in faults))


if __name__ == "__main__":
    main()
