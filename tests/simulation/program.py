"""What programs have in common that play one thing in small simulated clusters: a line for each seed, or its story."""

from __future__ import annotations

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
    world = World(seed, last_s=2000.0)
    cluster = Cluster(world)
    for _ in range(3):
        cluster.add_node(CPU=2)
    OwnState(world)
    try:
        world.run(lambda: play(cluster, 1 + seed % 4))
        assert not world.failures, world.failures
    except BaseException:
        for at_s, who, what in world.story if tells else []:
            print(f"  {at_s:10.4f} {who}: {what}")
        raise
    return world


def main(play: Play) -> None:
    """Play the seeds that the command line names by the first one and their number."""
    logging.getLogger("raycore").setLevel(logging.CRITICAL)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            print(seed, run(play, seed, tells=count == 1).digest, flush=True)
        except BaseException as error:
            print(seed, "failed:", "".join(traceback.format_exception(error)), flush=True)
