"""Several servers behind a load balancer, each with an engine of its own for a part of the ranks.

Each is a driver on a node of its own, if there are so many. One that dies takes its engine with it, and no other one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from simulation.cluster.deployments.deployment import Deployment, Kind
from simulation.cluster.records import Record, Recorder
from simulation.ray.cluster import Cluster
from simulation.scenario import Fault, Moment, Scenario
from simulation.world.kernel import Process


@dataclass
class Server:
    """One of the drivers of a run."""

    name: str
    scenario: Scenario
    """With its own options, requests and operations."""
    recorder: Recorder
    process: Process | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it has been killed, or its node has crashed: then nobody answers for its requests."""
        return self.process is not None and self.process.exit_code not in (None, 0)


def servers_of(scenario: Scenario) -> Iterator[Server]:
    """The servers of a scenario: usually one, which has all. Otherwise a load balancer gives each the next request."""
    records = [Record(number, request) for number, request in enumerate(scenario.requests)]
    if not scenario.servers:
        yield Server("driver", scenario, Recorder(records, options=scenario.options))
        return
    for index, options in enumerate(scenario.servers):
        own = replace(
            scenario,
            options=scenario.options | options,
            requests=scenario.requests[index :: len(scenario.servers)],
            operations=() if index else scenario.operations,
        )
        recorder = Recorder(records[index :: len(scenario.servers)], options=own.options)
        yield Server(f"server{index}", own, recorder)


LACKS = ("rank", "ended by operators", "ended between pieces")
"""A server knows only its own ranks, and the load balancer doesn't know which ones these are. Operators are at the
first server."""


def drawn(draw: random.Random) -> Deployment:
    num_servers, faults = draw.choice([2, 2, 3]), server_faults(draw)
    if draw.random() < 0.5:
        return Deployment(
            {},
            num_servers,
            num_workers=draw.choice([1, 2]),
            servers=parts(num_servers),
            lacks=LACKS,
            faults=server_faults(draw),
        )
    local = draw.choice([1, 2])
    return Deployment({}, num_servers * local, servers=parts(num_servers, local), lacks=LACKS, faults=faults)


def parts(num_servers: int, ranks_each: int | None = None) -> tuple[dict[str, Any], ...]:
    """The options of each server. `ranks_each`: with hybrid load balancing. None: external, a rank for each."""
    if ranks_each is None:
        return tuple({"data_parallel_rank": index, "data_parallel_external_lb": True} for index in range(num_servers))
    return tuple(
        {
            "data_parallel_hybrid_lb": True,
            "data_parallel_size_local": ranks_each,
            "data_parallel_start_rank": index * ranks_each,
        }
        for index in range(num_servers)
    )


def server_faults(draw: random.Random) -> tuple[Fault, ...]:
    """Maybe the end of a server."""
    if draw.random() < 0.5:
        return ()
    when = Moment(round(draw.uniform(0.0, 3.0), 4))
    return (Fault(when=when, kind="kill server", target=draw.randrange(3)),)


# ---- what breaks


def _kill(cluster: Cluster, fault: Fault) -> None:
    processes = [each for each in cluster.world.processes if each.name.startswith("server") and not each.has_ended]
    if len(processes) > 1:
        cluster.world.kill(processes[fault.target % len(processes)])


FAULTS: dict[str, Kind] = {"kill server": _kill}
