"""Ranks that read each other's caches, and ranks that compute prompts for others.

The workers talk over simulated sockets (`simulation.world.streams`). Either side of a read may die in the middle of it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from simulation.cluster.deployments.deployment import Deployment, naps
from simulation.scenario import AtMessage, Fault, Moment


def drawn(draw: random.Random) -> Deployment:
    settings: dict[str, Any] = {
        "min_fetch_tokens": 8,
        "compare_costs": draw.random() < 0.2,
        "fetch_timeout_s": draw.choice([0.005, 0.5, 10.0, 10.0]),
        "num_threads": draw.choice([1, 2]),
    }
    if draw.random() < 0.2:
        settings["host"] = ""
    connector = draw.choice(["PeersConnector", "DisaggregationConnector"])
    if connector == "DisaggregationConnector":
        settings |= {
            "num_prefill_ranks": draw.choice([0, 1, 1, 2]),
            "min_prefill_tokens": draw.choice([8, 32]),
            "lease_s": draw.choice([0.05, 5.0, 30.0]),
        }
    num_ranks, num_stages, num_workers = draw.choice([(2, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1)])
    transfer: dict[str, Any] = {"kv_connector": connector, "kv_connector_extra_config": settings}
    made = Deployment(
        {
            "kv_transfer_config": transfer,
            "enable_prefix_caching": True,
        },
        num_ranks,
        num_stages,
        num_workers,
        num_repeats=draw.choice([6, 12, 16]),
        faults=tuple(drawn_fault(draw) for _ in range(draw.choice([0, 0, 1, 2]))),
    )
    if draw.random() < 0.3:
        transfer["kv_load_failure_policy"] = "fail"
    made = _scarce(draw, made, settings) if draw.random() < 0.3 and "lease_s" in settings else made
    made = _apart(made) if draw.random() < 0.2 and num_stages * num_workers == 1 else made
    return replace(made, operations=naps(draw, "bytes")) if draw.random() < 0.2 else made


def _apart(made: Deployment) -> Deployment:
    """The same with hardly more than a node for each rank, so that most reads go over the network."""
    return replace(made, nodes=({"CPU": 6.0}, *({"CPU": 2.0},) * made.num_ranks))


def _scarce(draw: random.Random, made: Deployment, settings: dict[str, Any]) -> Deployment:
    """The same with few blocks, long leases, and ranks that end while blocks are kept for them."""
    settings["lease_s"] = 30.0
    few = {"num_gpu_blocks_override": draw.choice([33, 36, 40])}
    ends = tuple(
        Fault(when=Moment(round(draw.uniform(0.0, 3.0), 4)), kind="kill engine", target=draw.randrange(8))
        for _ in range(draw.choice([1, 2, 3]))
    )
    return replace(made, options=made.options | few, num_repeats=16, faults=made.faults + ends)


def drawn_fault(draw: random.Random) -> Fault:
    """Either side of a read dies or stands still in the middle of it."""
    kind = draw.choice(["kill sender", "kill receiver", "stop sender", "stop receiver"])
    when = AtMessage("bytes", "sent", draw.choice([1, 2, 3, 4, 6, 10, 20]))
    return Fault(when=when, kind=kind, for_s=draw.choice([0.05, 0.5, 12.0]))
