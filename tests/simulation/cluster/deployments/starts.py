"""Starts that fail: a worker refuses, fails, ends or hangs, an option has no valid value, or there is no room."""

from __future__ import annotations

import random
from typing import Any

from simulation.cluster.deployments.deployment import Deployment

STAGES = ("__init__", "init_device", "load_model", "get_kv_cache_spec", "initialize_cache", "warm_up")
"""Of a worker's start: the methods after which it may not go on."""
WAYS = ("refuses", "fails", "ends", "hangs")


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_workers = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    options: dict[str, Any] = {"init_timeout_s": draw.choice([20.0, 60.0]), "placement_timeout_s": 10.0}
    nodes: tuple[dict[str, float], ...] = ()
    why = draw.choice(["worker", "worker", "worker", "worker", "option", "room"])
    if why == "worker":
        name = class_name(draw.choice(STAGES), draw.choice(WAYS), is_any=draw.random() < 0.5)
        options["worker_cls"], error = f"simulation.worker.starting.{name}", "InitializationError"
    elif why == "option":
        options["scheduler_cls"], error = "simulation.no_such_scheduler", "InvalidConfig"
    else:
        nodes, error = ({"CPU": 1.0},), "PlacementShortage"
    return Deployment(options, num_ranks, num_workers=num_workers, nodes=nodes, start_error=error)


def class_name(stage: str, way: str, *, is_any: bool) -> str:
    """The name of a class of workers in `simulation.worker.starting`.

    `is_any`: no worker of the engine starts. Otherwise it is only the last one of the last rank.
    """
    return f"{way}_in_{stage.strip('_')}_{'all' if is_any else 'last'}"
