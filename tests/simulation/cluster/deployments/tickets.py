"""Ranks that hand over prompts by tickets of callers, as engines behind a proxy do: see `kinds.tickets`."""

from __future__ import annotations

import random
from typing import Any

from simulation.cluster.anywhere import MODEL
from simulation.cluster.deployments import peers
from simulation.cluster.deployments.deployment import Deployment


def drawn(draw: random.Random) -> Deployment:
    role = draw.choice(["kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"])
    settings: dict[str, Any] = {
        "secret_file": f"{MODEL}/config.json",  # whatever is in it
        "min_fetch_tokens": 8,
        "compare_costs": draw.random() < 0.2,
        "fetch_timeout_s": draw.choice([0.005, 0.5, 10.0]),
        "lease_s": draw.choice([0.05, 5.0, 30.0]),
    }
    if role == "kv_both":
        settings["num_prefill_ranks"] = draw.choice([0, 0, 1])
    options: dict[str, Any] = {
        "kv_transfer_config": {
            "kv_connector": "DisaggregationConnector",
            "kv_role": role,
            "engine_id": "one",
            "kv_connector_extra_config": settings,
        },
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": draw.choice([36, 64]),
    }
    sizes = draw.choice([(1, 1, 1), (2, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2)])
    faults = tuple(peers.drawn_fault(draw) for _ in range(draw.choice([0, 0, 1, 2])))
    return Deployment(options, *sizes, num_repeats=draw.choice([6, 12]), faults=faults)
