"""Ranks of several stages. While one stage computes a step, others compute the steps after it.

Stages wait for each other: see `simulation.worker.line`. Any worker may die or stand still.
"""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.scenario import Fault, Moment


def drawn(draw: random.Random) -> Deployment:
    options = {}
    if draw.random() < 0.3:
        options["max_concurrent_batches"] = draw.choice([1, 2, 4])
    return Deployment(
        options,
        num_ranks=draw.choice([1, 1, 2]),
        num_stages=draw.choice([2, 2, 3]),
        num_workers=draw.choice([1, 1, 2]),
        faults=tuple(_fault(draw) for _ in range(draw.choice([0, 0, 1]))),
    )


def _fault(draw: random.Random) -> Fault:
    kind = draw.choice(["kill worker", "stop worker"])
    when = Moment(round(draw.uniform(0.0, 2.0), 4))
    return Fault(when=when, kind=kind, target=draw.randrange(8), for_s=draw.choice([0.05, 3.0, 12.0]))
