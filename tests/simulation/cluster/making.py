"""Makes a scenario from a seed."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from simulation.cluster import circumstances, deployments, kinds
from simulation.cluster.operations.catalogue import draw_operations
from simulation.scenario import BOUNDARIES, AtMessage, Fault, Moment, Request, Scenario

_METHODS = ("submit", "abort", "outputs", "run", "step_age_s", "utility", "set_activity", "call", "wait_for_init")
"""Calls at whose boundaries something may break."""
_AT_MOMENTS = (
    "kill engine", "kill worker", "stop engine", "stop worker", "out of memory", "crash node", "drain node",
    "stall gcs", "restart gcs",
)  # fmt: skip
_AT_MESSAGES = ("kill sender", "kill receiver", "kill engine", "stop engine")
_SECONDS = 4.0
"""Virtual seconds in which requests come and things break."""


def scenario_of(seed: int, *, at_statements: bool = False, capability: str | None = None) -> Scenario:
    """The scenario of a seed. Small ones are as likely as large ones: they are quick, and find as much.

    `capability`: one of `deployments.CAPABILITIES` that the engine has to have. None: the seed decides.
    """
    draw = random.Random(f"scenario {seed}")
    num_ranks, num_workers = draw.choice([(1, 1), (2, 1), (2, 1), (2, 2), (3, 1), (4, 1)])
    num_nodes = draw.choice([1, 1, 2, 3])
    chosen, options = kinds.drawn_for_engine(draw, _options(draw, num_ranks, num_workers))
    deployment = deployments.deployment_of(seed, capability)
    if deployment is not None:
        # its kinds come last, because they need options that not all deployments have
        chosen, options = [], _options(draw, num_ranks, num_workers) | deployment.size | deployment.options
        num_ranks, num_workers = deployment.num_ranks, deployment.num_stages * deployment.num_workers
    requests = tuple(kinds.drawn_for_request(draw, each, chosen, options) for each in _requests(draw))
    if deployment is not None:
        requests += deployments.repeated(requests, deployment.num_repeats, seed)
        requests += deployments.late(requests, deployment.operations, seed)
    # room for all ranks, and for one more
    nodes = tuple({"CPU": float(2 + -(-(num_ranks + 1) * num_workers // num_nodes) + 1)} for _ in range(num_nodes))
    operations, faults = (() if deployment is None else getattr(deployment, each) for each in ("operations", "faults"))
    num_faults = [0] if deployment is not None and deployment.is_calm else [0, 0, 1, 1, 1, 2, 3]
    around = circumstances.NONE
    # several engines can't have one name, and whoever waits for all ranks takes none for lost that isn't watched
    if deployment is None or not (deployment.servers or deployment.awaits_ranks):
        around = circumstances.drawn(seed, options)
    scenario = Scenario(
        seed=seed,
        options=options | around.options,
        servers=() if deployment is None else deployment.servers,
        num_api_servers=0 if deployment is None else deployment.num_api_servers,
        nodes=nodes if deployment is None else deployment.nodes or nodes,
        awaits_ranks=deployments.awaits_ranks(deployment, seed),
        start_error="" if deployment is None else deployment.start_error,
        exports_metrics=around.exports_metrics,
        late_calls={} if deployment is None else deployment.late_calls,
        requests=requests,
        operations=draw_operations(draw, options, _SECONDS, (*operations, *around.operations)),
        faults=(
            *(_fault(draw) for _ in range(draw.choice(num_faults))),
            *faults,
            *around.faults,
        ),
        at_statements=at_statements,
    )
    if deployment is None:
        return kinds.with_kinds(scenario, kinds.APART)
    if deployment.requests:
        return msgspec.structs.replace(scenario, requests=deployment.requests, operations=(), faults=())
    scenario = kinds.with_kinds_of_deployment(scenario, deployment.lacks)
    done = tuple(each for each in scenario.operations if each.kind not in deployment.lacks_operations)
    return msgspec.structs.replace(scenario, operations=done)


def _options(draw: random.Random, num_ranks: int, num_workers: int) -> dict[str, Any]:
    options: dict[str, Any] = {"data_parallel_size": num_ranks, "tensor_parallel_size": num_workers}
    rare: dict[str, list[Any]] = {
        "enable_prefix_caching": [False],
        "num_gpu_blocks_override": [40, 48],
        "max_num_seqs": [2, 4],
        "max_num_batched_tokens": [16, 32],
        "async_scheduling": [False],
        "scheduling_policy": ["priority"],
        "standby_delay_s": [0.0],
        "step_timeout_s": [5.0],
        "drain_timeout_s": [0.5],
    }
    return options | {name: draw.choice(values) for name, values in rare.items() if draw.random() < 0.25}


def _requests(draw: random.Random) -> list[Request]:
    """Some requests: as they come, or all at once."""
    made = [_request(draw) for _ in range(draw.choice([1, 2, 4, 8, 16]))]
    return [msgspec.structs.replace(each, at_s=made[0].at_s) for each in made] if draw.random() < 0.1 else made


def _request(draw: random.Random) -> Request:
    seed = draw.choice([None, draw.randrange(1000)])
    prefix = ((draw.randrange(2), draw.choice([8, 24, 60])),) if draw.random() < 0.6 else ()
    return Request(
        at_s=round(draw.choice([0.0, draw.uniform(0.0, _SECONDS)]), 4),
        prompt=(*prefix, (draw.randrange(2, 1000), draw.choice([1, 3, 8, 17, 40, 40, 140]))),
        max_tokens=draw.choice([1, 4, 16, 48]),
        n=1 if seed is None else draw.choice([1, 1, 2, 3]),
        seed=seed,
        priority=draw.choice([0, 0, 1, -1]),
        is_stream=draw.random() < 0.7,
        abort_after_s=round(draw.uniform(0.0, 1.0), 4) if draw.random() < 0.15 else None,
        caller=draw.choice([0, 0, 0, 1]),
    )


def _fault(draw: random.Random) -> Fault:
    for_s = draw.choice([0.05, 0.5, 3.0, 12.0])
    target = draw.randrange(8)
    if draw.random() < 0.5:
        at_s = round(draw.uniform(0.0, _SECONDS), 4)
        return Fault(when=Moment(at_s), kind=draw.choice(_AT_MOMENTS), target=target, for_s=for_s)
    when = AtMessage(draw.choice(_METHODS), draw.choice(BOUNDARIES), draw.choice([1, 1, 2, 3, 5, 10, 30]))
    return Fault(when=when, kind=draw.choice(_AT_MESSAGES), target=target, for_s=for_s)


def calm() -> Scenario:
    """A scenario in which nothing breaks and no operator does anything: what any test of an engine does."""
    draw = random.Random("calm")
    requests = tuple(msgspec.structs.replace(_request(draw), abort_after_s=None) for _ in range(8))
    return Scenario(seed=0, options={"data_parallel_size": 2}, nodes=({"CPU": 8.0},), requests=requests)
