"""Plays one thing in small simulated clusters: prints a line for each seed, or its story.

    python -m simulation.program ranks FIRST_SEED NUM_SEEDS        or owners, with `tests` on the path

What is played is imported by its name: the simulated Ray would take classes of the program itself along in messages,
with the path of their file.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable

from simulation.ray.cluster import Cluster
from simulation.world.kernel import World
from simulation.world.own_state import OwnState

Play = Callable[[Cluster, int], object]
"""Plays with a cluster of three nodes and so many ranks. What it raises is a failure."""


def run(play: Play, seed: int, *, tells: bool = False) -> World:
    """Play one seed. `tells`: print its story if it fails."""
    from simulation.cluster.anywhere import same_paths  # imported lazily: it imports some of the product

    world = World(seed, last_s=2000.0)
    cluster = Cluster(world)
    for _ in range(3):
        cluster.add_node(CPU=2)
    OwnState(world)
    try:
        with same_paths():
            world.run(lambda: play(cluster, 1 + seed % 4))
        assert not world.failures, world.failures
    except BaseException:
        for at_s, who, what in world.story if tells else []:
            print(f"  {at_s:10.4f} {who}: {what}")
        raise
    return world


def main() -> None:
    logging.getLogger("raycore").setLevel(logging.CRITICAL)
    play: Play = importlib.import_module(f"simulation.{sys.argv[1]}").main
    first, count = int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + count):
        try:
            print(seed, run(play, seed, tells=count == 1).digest, flush=True)
        except BaseException as error:
            print(seed, "failed:", "".join(traceback.format_exception(error)), flush=True)


if __name__ == "__main__":
    main()
