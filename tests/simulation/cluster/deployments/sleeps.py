"""Engines that sleep and wake up, with workers that stand still meanwhile for longer than a start may take."""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.scenario import BOUNDARIES, AtMessage, Fault, Moment, Operation

_TIMEOUT_S = 60.0


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_workers = draw.choice([(1, 1), (1, 2), (2, 1), (2, 1)])
    at_s, until_s = (round(draw.uniform(least, most), 4) for least, most in ((0.0, 1.0), (2.0, 3.0)))
    sleep = {"level": draw.choice([1, 1, 2]), "mode": draw.choice(["abort", "keep"])}
    when: Moment | AtMessage = Moment(round(until_s + draw.uniform(-0.1, 0.1), 4))
    if draw.random() < 0.7:  # those for a pause, a sleep, a wake-up and the end of the pause
        when = AtMessage("set_activity", draw.choice(BOUNDARIES), draw.randint(1, 4 * num_ranks))
    return Deployment(
        {"step_timeout_s": draw.choice([5.0, 20.0]), "init_timeout_s": _TIMEOUT_S},
        num_ranks,
        num_workers=num_workers,
        operations=(
            Operation(at_s=at_s, kind="sleep", arguments=sleep),
            Operation(at_s=until_s, kind="wake_up"),
        ),
        faults=(Fault(when=when, kind="stop worker", target=draw.randrange(8), for_s=1.5 * _TIMEOUT_S),),
    )
