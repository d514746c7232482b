"""Engines whose own program loses its Ray node, while its process goes on."""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.scenario import Fault, Moment


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_workers = draw.choice([(1, 1), (2, 1), (2, 1), (2, 2), (3, 1)])
    when = Moment(round(draw.uniform(0.0, 3.0), 4))
    return Deployment({}, num_ranks, num_workers=num_workers, faults=(Fault(when=when, kind="end own raylet"),))
