"""Connectors that users have written: see `simulation.worker.users_connector`."""

from __future__ import annotations

import random
from typing import Any

from simulation.cluster.deployments.deployment import EVENTS, Deployment, naps

_CLASS = "simulation.worker.users_connector.UsersConnector"


def drawn(draw: random.Random) -> Deployment:
    settings = {
        "is_async": draw.choice([0.0, 0.5, 1.0]),
        "is_undecided": draw.choice([0.0, 0.0, 0.5]),
        "is_partial": draw.choice([0.0, 0.5]),
        "fails": draw.choice([0.0, 0.1, 0.3]),
        "loses_good": draw.choice([0.0, 0.0, 0.0, 0.02]),
        "keeps_blocks": draw.choice([0.0, 0.5, 1.0]),
        "is_done": draw.choice([0.05, 0.3]),
        "gives_up": draw.choice([0.1, 1.0]),
    }
    transfer: dict[str, Any] = {"kv_connector": _CLASS, "kv_connector_extra_config": settings}
    if draw.random() < 0.5:
        transfer["kv_load_failure_policy"] = "fail"
    options: dict[str, Any] = {
        "kv_transfer_config": transfer,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": draw.choice([33, 36, 48, 64]),
    }
    if draw.random() < 0.3:
        options["kv_events_config"] = EVENTS
    sizes = draw.choice([(1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)])
    num_repeats = draw.choice([6, 12, 16])
    operations = naps(draw) if draw.random() < 0.3 else ()
    return Deployment(options, *sizes, num_repeats=num_repeats, operations=operations)
