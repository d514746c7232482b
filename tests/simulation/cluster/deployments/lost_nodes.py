"""Nodes that crash and come back after minutes, in clusters with little room besides, and ranks with few restarts.

Often a trainer has brought weights before, which no checkpoint has.
"""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment, update_of_all
from simulation.scenario import Fault, Moment

_CPUS_OF_A_RANK = 2.0
"""Its worker's and its engine's."""


def drawn(draw: random.Random) -> Deployment:
    num_ranks = draw.choice([2, 2, 3])
    options = {
        "max_rank_restarts": draw.choice([1, 1, 2]),
        "placement_timeout_s": draw.choice([2.0, 10.0, 60.0]),
    }
    cpus = [_CPUS_OF_A_RANK] * num_ranks
    if draw.random() < 0.3:
        cpus[draw.randrange(num_ranks)] += _CPUS_OF_A_RANK
    others = [draw.choice(["lose node", "kill engine", "kill worker"])] if draw.random() < 0.5 else []
    return Deployment(
        options,
        num_ranks,
        operations=update_of_all(draw, draw.uniform(0.0, 1.0)) if draw.random() < 0.6 else (),
        faults=tuple(_fault(draw, kind) for kind in ("lose node", *others)),
        nodes=tuple({"CPU": each} for each in cpus),
        lacks=("slow pieces",),  # whose engines are given up
        awaits_ranks=True,
    )


def _fault(draw: random.Random, kind: str) -> Fault:
    for_s = draw.choice([5.0, 100.0, 200.0]) if kind == "lose node" else 0.0
    return Fault(when=Moment(round(draw.uniform(0.0, 4.0), 4)), kind=kind, target=draw.randrange(8), for_s=for_s)
