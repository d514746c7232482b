"""What engines may be made of: stages, shared experts, caches elsewhere, layers of several kinds, servers.

A module for each capability. Its `drawn` draws a `Deployment`: options of the engine, how large it is, and what can
break in it besides. Its `FAULTS`, if it has any, are faults of its own. What a worker does in it is in
`simulation.worker`, and the judges know all by the configuration alone.
"""

from __future__ import annotations

__all__ = ["CAPABILITIES", "FAULTS", "PLAIN", "awaits_ranks", "deployment_of", "late", "repeated"]

import random
from collections.abc import Callable

from simulation.cluster.deployments import (
    api_servers,
    connectors,
    experts,
    grouped,
    lost_nodes,
    models,
    offload,
    own_node,
    peers,
    pipeline,
    regroups,
    returning,
    servers,
    sharing_servers,
    shutdowns,
    sleeps,
    starts,
    strict,
    tickets,
    updates,
)
from simulation.cluster.deployments.deployment import Deployment, Kind, late, repeated

_Drawn = Callable[[random.Random], Deployment]
_OFTEN: dict[str, _Drawn] = {
    "pipeline": pipeline.drawn,
    "experts": experts.drawn,
    "models": models.drawn,
    "offload": offload.drawn,
    "peers": peers.drawn,
    "servers": servers.drawn,
    "api_servers": api_servers.drawn,
}
_RARE: dict[str, _Drawn] = {
    "lost_nodes": lost_nodes.drawn,
    "updates": updates.drawn,
    "starts": starts.drawn,
    "shutdowns": shutdowns.drawn,
    "own_node": own_node.drawn,
    "sleeps": sleeps.drawn,
}
"""Those that take long, or that few faults need."""
_LATER: dict[str, tuple[str, _Drawn]] = {
    "strict": ("added deployment", strict.drawn),
    "connectors": ("users' connectors", connectors.drawn),
    "returning": ("callers who come back", returning.drawn),
    "regroups": ("ranks that regroup", regroups.drawn),
    "grouped": ("windows kept elsewhere", grouped.drawn),
    "sharing_servers": ("servers that share experts", sharing_servers.drawn),
    "states_elsewhere": ("states that are kept elsewhere", grouped.drawn_with_states),
    "tickets": ("tickets of callers", tickets.drawn),
}
"""Those that came later: each is drawn apart, by a generator for this purpose, so that other seeds have the engines
that they had."""
CAPABILITIES = _OFTEN | _RARE | {name: drawn for name, (_, drawn) in _LATER.items()}
FAULTS: dict[str, Kind] = {**offload.FAULTS, **servers.FAULTS, **api_servers.FAULTS}
"""What breaks in deployments, by the names that scenarios have."""
PLAIN = "plain"
"""Instead of a capability: none."""
_PLAIN_SHARE, _RARE_SHARE, _LATER_SHARE, _AWAITING_SHARE = 0.45, 0.1, 0.02, 0.1


def deployment_of(seed: int, capability: str | None = None) -> Deployment | None:
    """The deployment of a seed. None: ranks that know nothing of each other, of a model with plain attention.

    `capability`: that it has to have, or `PLAIN`. None: the seed decides.
    """
    draw, rare = random.Random(f"deployment {seed}"), random.Random(f"rare deployment {seed}")
    for name, (purpose, _) in _LATER.items():
        if capability is None and random.Random(f"{purpose} {seed}").random() < _LATER_SHARE:
            capability = name
    if capability is None and rare.random() < _RARE_SHARE:
        capability = rare.choice(list(_RARE))
    if capability is None:
        capability = PLAIN if draw.random() < _PLAIN_SHARE else draw.choice(list(_OFTEN))
    if capability == PLAIN:
        return None
    return CAPABILITIES[capability](random.Random(f"{capability} {seed}"))


def awaits_ranks(deployment: Deployment | None, seed: int) -> bool:
    """See `Scenario.awaits_ranks`: some of all engines do."""
    is_own = deployment is not None and deployment.awaits_ranks
    return is_own or random.Random(f"awaits ranks {seed}").random() < _AWAITING_SHARE
