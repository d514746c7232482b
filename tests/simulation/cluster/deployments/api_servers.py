"""Several API servers of one engine: processes that each have a client of the engine's ranks.

Their driver starts, watches and replaces them, and makes calls on the engine for them. One that dies takes its requests
with it, and no other ones.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from simulation.cluster.deployments.deployment import Deployment, Kind
from simulation.ray.cluster import Cluster
from simulation.scenario import BOUNDARIES, AtMessage, Fault, Moment, Operation
from simulation.world.kernel import Process

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

SERVER = "APIServer"
OPERATIONS = ("abort_requests", "reset_prefix_cache")
"""What operators ask of an API server. What has to be undone later they do at the driver, whose answer isn't lost."""
_LACKS = ("added", "pieces", "slow pieces", "refused")
"""They make calls that HTTP has no counterpart of."""
_SECONDS = 4.0
_METHODS = ("submit", "outputs", "reports", "on_rank_event", "finish_call", "abort_requests", "pause_new")


@contextmanager
def serving(llm: AsyncLLM, count: int) -> Generator[None, None, None]:
    """Have API servers serve while the block runs, as `raycore serve` does."""
    # imported lazily: the world has to be in its place before the product
    from raycore.parts.adapters.server.adapters import OfferedAdapters
    from raycore.server.listen_options import ListenOptions
    from raycore.server.multi_process.api_servers import APIServers
    from raycore.server.options import ServerOptions

    options = ServerOptions(("simulated",))
    servers = APIServers(llm, options, OfferedAdapters(llm, options), ListenOptions(), count)
    try:
        servers.start()
        yield
        servers.check()
        while llm.unavailable_reason is None and not llm.clients.drain(0.25):
            pass
    finally:
        servers.stop()


def drawn(draw: random.Random) -> Deployment:
    num_ranks, num_workers = draw.choice([(1, 1), (2, 1), (2, 1), (2, 2), (3, 1)])
    return Deployment(
        {},
        num_ranks,
        num_workers=num_workers,
        num_api_servers=draw.choice([2, 2, 3]),
        lacks=_LACKS,
        operations=tuple(_operation(draw) for _ in range(draw.choice([0, 1, 2]))),
        faults=tuple(_fault(draw) for _ in range(draw.choice([0, 0, 1, 1, 2]))),
    )


def _operation(draw: random.Random) -> Operation:
    at_s = round(draw.uniform(0.0, _SECONDS), 4)
    return Operation(at_s=at_s, kind="abort_requests", arguments={"request_ids": None})


def _fault(draw: random.Random) -> Fault:
    kind = draw.choice(["kill API server", "kill API server", "stop API server", "kill driver"])
    when: Moment | AtMessage = Moment(round(draw.uniform(0.0, _SECONDS), 4))
    if draw.random() < 0.3:
        when = AtMessage(draw.choice(_METHODS), draw.choice(BOUNDARIES), draw.choice([1, 2, 3, 5]))
    # one that is stopped for longer counts as stuck, and is replaced
    return Fault(when=when, kind=kind, target=draw.randrange(8), for_s=draw.choice([0.05, 3.0, 12.0, 50.0]))


# ---- what breaks


def _process(cluster: Cluster, fault: Fault) -> Process | None:
    """One of the API servers' processes that live."""
    actors = [each for each in cluster.gcs.actors.values() if each.class_name == SERVER]
    processes = [each.incarnation.process for each in actors if each.incarnation is not None]
    living = [each for each in processes if not each.has_ended]
    return living[fault.target % len(living)] if living else None


def _kill(cluster: Cluster, fault: Fault) -> None:
    process = _process(cluster, fault)
    if process is not None:
        cluster.world.kill(process)


def _stop(cluster: Cluster, fault: Fault) -> None:
    process = _process(cluster, fault)
    if process is not None:
        cluster.world.call_later(fault.for_s, lambda: cluster.world.go_on(process))
        cluster.world.stop(process)


def _kill_driver(cluster: Cluster, fault: Fault) -> None:
    for process in cluster.world.processes:
        if process.name == "driver" and not process.has_ended:
            cluster.world.kill(process)
            return


FAULTS: dict[str, Kind] = {"kill API server": _kill, "stop API server": _stop, "kill driver": _kill_driver}
