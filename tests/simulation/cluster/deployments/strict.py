"""Engines that spread their ranks evenly over the nodes (`strict`), of which one stands still and comes back as it was.

A rank that runs requests there is noticed, and goes elsewhere. Later, another rank is lost, or one is added: it has to
go to the node that is back.
"""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.scenario import Fault, Moment, Operation

_CPUS_OF_A_RANK = 2.0
"""Its worker's and its engine's."""
_STEP_TIMEOUT_S = 3.0
"""Less than nodes stand still: so the ranks on them count as stuck meanwhile."""
_LATER_S, _LAST_S = 30.0, 60.0
"""Virtual seconds after which ranks have moved, and serve again, and after which what comes then is over, too."""


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_nodes = draw.choice([(2, 2), (2, 2), (3, 3), (4, 2)])
    still_s = round(draw.uniform(2 * _STEP_TIMEOUT_S, 9.5), 4)
    still = Fault(when=Moment(round(draw.uniform(0.0, 3.0), 4)), kind="node stands still", for_s=still_s)
    later, adds = round(draw.uniform(_LATER_S, _LATER_S + 10.0), 4), draw.random() < 0.4
    operations = [Operation(at_s=_LAST_S, kind="check_health")]
    if adds:
        operations.insert(0, Operation(at_s=later, kind="scale", arguments={"data_parallel_size": num_ranks + 1}))
    kill = Fault(when=Moment(later), kind="kill engine", target=draw.randrange(8))
    return Deployment(
        {"placement_strategy": "strict", "step_timeout_s": _STEP_TIMEOUT_S, "standby_delay_s": None},
        num_ranks,
        operations=tuple(operations),
        faults=(still,) if adds else (still, kill),
        nodes=tuple({"CPU": _CPUS_OF_A_RANK * (num_ranks + 1)} for _ in range(num_nodes)),
        num_repeats=12,
        lacks=("slow pieces",),  # whose engines are given up
        awaits_ranks=True,
    )
