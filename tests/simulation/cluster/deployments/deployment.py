"""What modules of deployments have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from simulation.ray.cluster import Cluster
from simulation.scenario import AtMessage, Fault, Operation, Request
from simulation.worker import model

_SECONDS = 3.0
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
"""An engine's `kv_events_config`. Events leave no process then: `accounts.connectors` follows them in there."""
_BEFORE_S = 0.3
_LATER_S = 5.0, 20.0
"""How long a change of the number of ranks may take, in which some start."""

Kind = Callable[[Cluster, Fault], object]
"""Breaks something."""


@dataclass(frozen=True)
class Deployment:
    """What is special about an engine."""

    options: dict[str, Any]
    """Of the engine. They win over others that a seed draws."""
    num_ranks: int = 1
    num_stages: int = 1
    num_workers: int = 1
    """Of a stage."""
    num_repeats: int = 0
    """How many requests come besides with prompts of others: what a cache elsewhere is for."""
    requests: tuple[Request, ...] = ()
    """All that come, while nothing breaks and operators do nothing. Empty: any requests, and all that there is."""
    lacks: tuple[str, ...] = ()
    """The names of the kinds that requests can't be of. They may be of all others: see `cluster.kinds`."""
    lacks_operations: tuple[str, ...] = ()
    """What operators don't do."""
    servers: tuple[dict[str, Any], ...] = ()
    """See `Scenario.servers`."""
    num_api_servers: int = 0
    """See `Scenario.num_api_servers`."""
    operations: tuple[Operation, ...] = ()
    """What operators do, besides what they do with any engine."""
    faults: tuple[Fault, ...] = ()
    """What breaks, besides what breaks in any engine."""
    nodes: tuple[dict[str, float], ...] = ()
    """The cluster's. Empty: some with room for all ranks, and for one more."""
    awaits_ranks: bool = False
    """See `Scenario.awaits_ranks`."""
    start_error: str = ""
    """See `Scenario.start_error`."""
    late_calls: dict[str, float] = field(default_factory=dict[str, float])
    """See `Scenario.late_calls`."""
    is_calm: bool = False
    """Whether nothing breaks but `faults`, as it may in any engine."""

    @property
    def size(self) -> dict[str, int]:
        """The options that say how large the engine is."""
        return {
            "data_parallel_size": self.num_ranks,
            "tensor_parallel_size": self.num_workers,
            "pipeline_parallel_size": self.num_stages,
        }


def repeated(requests: Sequence[Request], count: int, seed: int) -> tuple[Request, ...]:
    """Some of `requests` again, `count` in all, with one of a few long prompts, in bursts too large for one rank."""
    draw = random.Random(f"repeats {seed}")
    moments = [round(draw.uniform(0.0, _SECONDS), 4) for _ in range(2)]
    texts = [((draw.randrange(2), 60), (draw.randrange(1000, 2000), draw.choice([8, 40]))) for _ in range(2)]
    return tuple(
        replace(
            draw.choice(requests),
            at_s=round(draw.choice(moments) + draw.choice([0.0, 0.0, draw.uniform(0.0, 0.3)]), 4),
            prompt=draw.choice(texts),
            abort_after_s=round(draw.uniform(0.0, 0.2), 4) if draw.random() < 0.1 else None,
        )
        for _ in range(count)
    )


def late(requests: Sequence[Request], operations: Sequence[Operation], seed: int) -> tuple[Request, ...]:
    """A few of `requests` again, just before each change of the number of ranks, and some time after it.

    All ranks go on that were there.
    """
    scalings = [each.at_s for each in operations if each.kind == "scale"]
    draw = random.Random(f"late requests {seed}")
    if not scalings or draw.random() < 0.3:
        return ()
    moments = [round(at_s + draw.uniform(*_LATER_S), 4) for at_s in scalings]
    moments += [round(max(0.0, at_s - draw.uniform(0.0, _BEFORE_S)), 4) for at_s in scalings]
    return tuple(replace(draw.choice(requests), at_s=at_s, abort_after_s=None) for at_s in moments for _ in range(6))


def naps(draw: random.Random, method: str | None = None) -> tuple[Operation, ...]:
    """Short sleeps while requests wait, each with a message of `method` if one comes: transfers are under way then."""
    made: list[Operation] = []
    for at_s in sorted(draw.uniform(0.0, _SECONDS) for _ in range(draw.choice([1, 2, 3]))):
        when = None if method is None else AtMessage(method, "sent", draw.randint(1, 30))
        sleep = {"level": 1, "mode": "keep"}
        made.append(Operation(at_s=round(at_s, 4), kind="sleep", arguments=sleep, with_message=when))
        made.append(Operation(at_s=round(at_s + draw.uniform(0.0, 0.5), 4), kind="wake_up"))
    return tuple(made)


def dummy_model(architecture: str, **overrides: Any) -> dict[str, Any]:
    """The options of an engine that takes the demo model for another one. The simulated worker reads no tensors."""
    return {"load_format": "dummy", "hf_overrides": {"architectures": [architecture], **overrides}}


def update_of_all(draw: random.Random, at_s: float, gap_s: float = 0.0) -> tuple[Operation, ...]:
    """A trainer's update of all parts of the model, in two calls, with up to `gap_s` seconds before each next call."""
    number, split = draw.randrange(1000), draw.randrange(len(model.UNITS))
    calls: list[tuple[str, dict[str, Any]]] = [
        ("start_weight_update", {}),
        *(
            ("update_weights", {"checkpoint": f"trainer {number}", "names": list(names)})
            for names in (model.UNITS[:split], model.UNITS[split:])
        ),
        ("finish_weight_update", {"weight_version": f"update {number}"}),
    ]
    made: list[Operation] = []
    for kind, arguments in calls:
        made.append(Operation(at_s=round(at_s, 4), kind=kind, arguments=arguments))
        at_s += draw.uniform(0.0, gap_s)
    return tuple(made)
