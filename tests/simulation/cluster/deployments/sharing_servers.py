"""Several servers whose ranks share experts: they find each other, step together, and begin anew when one is lost."""

from __future__ import annotations

import random

from simulation.cluster.deployments.deployment import Deployment
from simulation.cluster.deployments.experts import options_of_shared
from simulation.cluster.deployments.servers import LACKS, parts, server_faults


def drawn(draw: random.Random) -> Deployment:
    num_servers, ranks_each = draw.choice([(2, 1), (2, 1), (3, 1), (2, 2)])
    return Deployment(
        options_of_shared(draw),
        num_servers * ranks_each,
        num_workers=draw.choice([1, 1, 2]),
        servers=parts(num_servers, ranks_each),
        lacks=LACKS,
        lacks_operations=_done_together(),
        faults=server_faults(draw),
    )


def _done_together() -> tuple[str, ...]:
    """What operators of one server can't do alone: the ranks of all servers would have to take part."""
    # imported lazily: they import the product, which the simulated Ray has to precede
    from simulation.cluster.operations.checkpoints import Checkpoints
    from simulation.cluster.operations.loads import Loads
    from simulation.cluster.operations.pauses import Pauses
    from simulation.cluster.operations.scaling import Scaling
    from simulation.cluster.operations.updates import Updates

    return tuple(kind for each in (Updates, Pauses, Checkpoints, Loads, Scaling) for kind in each.kinds)
