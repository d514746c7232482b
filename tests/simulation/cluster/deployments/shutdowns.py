"""Engines that are shut down while Ray's control store is away."""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.scenario import AtShutdown, Fault


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_workers = draw.choice([(1, 1), (1, 1), (2, 1), (2, 2)])
    when, kind = AtShutdown(draw.choice([0.0, 2.0, 2.0, 5.0])), draw.choice(["restart gcs", "restart gcs", "stall gcs"])
    return Deployment(
        {"standby_delay_s": draw.choice([None, None, 0.0, 5.0])},
        num_ranks,
        num_workers=num_workers,
        faults=(Fault(when=when, kind=kind, for_s=draw.choice([20.0, 50.0])),),
    )
