"""Weights that change, are dropped by a sleep and are read again, while now and then a worker fails in any of that."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.cluster.deployments.deployment import update_of_all
from simulation.cluster.operations.contract import operation
from simulation.scenario import Operation
from simulation.worker import model


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    """One or two rounds within the time in which requests come, by the operator who makes updates."""
    if options.get("runner") == "pooling":  # whose weights can't change
        return Circumstance()
    made: list[Operation] = []
    at_s = draw.uniform(0.0, 0.3)
    for _ in range(draw.choice([1, 2])):
        round_ = _change(draw, at_s) + _sleep(draw, at_s + draw.uniform(0.1, 0.5))
        if draw.random() < 0.8:
            kinds = draw.choice(_READS)
            broken = next(each for each in round_ if each.kind in kinds)
            round_.insert(round_.index(broken), _break(draw, broken.at_s, options))
        made += round_
        at_s = round_[-1].at_s + draw.uniform(0.2, 1.0)
    return Circumstance(operations=tuple(made))


_READS = (("update_weights", "reload_weights"), ("wake_up",))
"""Calls in which workers get weights."""


def _change(draw: random.Random, at_s: float) -> list[Operation]:
    if draw.random() < 0.7:
        return list(update_of_all(draw, at_s))
    number = draw.randrange(1, 20)
    return [operation(at_s, "reload_weights", checkpoint=number, weight_version=f"checkpoint {number}")]


def _sleep(draw: random.Random, at_s: float) -> list[Operation]:
    until_s = at_s + draw.uniform(0.0, 0.5)
    sleep = operation(at_s, "sleep", level=draw.choice([1, 2, 2]), mode=draw.choice(["abort", "keep", "keep"]))
    if draw.random() < 0.9:
        return [sleep, operation(until_s, "wake_up")]
    return [
        sleep,
        operation(until_s, "wake_up", tags=["weights"]),
        operation(until_s + draw.uniform(0.0, 0.3), "wake_up", tags=["kv_cache"]),
    ]


def _break(draw: random.Random, at_s: float, options: Mapping[str, Any]) -> Operation:
    rank, worker = draw.randrange(options["data_parallel_size"]), draw.choice([0, 0, 1])
    return operation(at_s, "break_worker", dp_rank=rank, worker=worker, after=draw.randrange(len(model.UNITS)))
