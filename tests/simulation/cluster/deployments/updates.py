"""Updates of weights by a trainer, in the middle of which processes of ranks end. Some of these ranks share experts."""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment, update_of_all
from simulation.cluster.deployments.experts import options_of_shared
from simulation.scenario import BOUNDARIES, AtMessage, Fault, Moment

_GAP_S = 0.5
"""Virtual seconds that may pass between two calls of an update."""


def drawn(draw: random.Random) -> Deployment:
    are_shared, at_s = draw.random() < 0.5, draw.uniform(0.0, 2.0)
    num_ranks, num_workers = draw.choice([(2, 1), (2, 1), (2, 2), (3, 1)] if are_shared else [(1, 1), (1, 2), (2, 1)])
    operations = update_of_all(draw, at_s, _GAP_S)
    return Deployment(
        options_of_shared(draw) if are_shared else {},
        num_ranks,
        num_workers=num_workers,
        operations=operations,
        faults=tuple(_fault(draw, at_s, operations[-1].at_s) for _ in range(draw.choice([1, 1, 2]))),
        lacks=("slow pieces",),  # whose engines are given up
        awaits_ranks=draw.random() < 0.5,
    )


def _fault(draw: random.Random, first_s: float, last_s: float) -> Fault:
    when: Moment | AtMessage = Moment(round(draw.uniform(first_s, last_s), 4))
    if draw.random() < 0.5:
        when = AtMessage("utility", draw.choice(BOUNDARIES), draw.randint(1, 8))
    return Fault(when=when, kind=draw.choice(["kill worker", "kill worker", "kill engine"]), target=draw.randrange(8))
