"""What all accounts have in common: when they look, and at what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from simulation.cluster.records import Record, Recorder
from simulation.scenario import Scenario

if TYPE_CHECKING:
    from raycore.client.rank_connections import RankConnection
    from raycore.engine.engine_actor import DPEngineCoreActor
    from raycore.llm import AsyncLLM
    from raycore.running_engine import RunningEngine
    from simulation.cluster.faults import Faults
    from simulation.front import Front
    from simulation.heard import Logged
    from simulation.ray.cluster import Cluster
    from simulation.world.kernel import Process


@dataclass
class Run:
    """What accounts look at."""

    scenario: Scenario
    cluster: Cluster
    recorder: Recorder
    faults: Faults
    logged: list[Logged]
    """The warnings and errors in the logs, as they come."""
    front: Front | None = None
    """Where the API servers of the engine are, if it has any."""
    shutdown_s: float = 0.0
    """When the shutdown of the engine began."""

    @property
    def is_unbroken(self) -> bool:
        """Whether nothing breaks in this run."""
        return not (self.scenario.faults or any(each.kind == "break_worker" for each in self.scenario.operations))

    @property
    def lacked_control_store(self) -> bool:
        """Whether Ray's control store may have taken no connections during the shutdown.

        An engine then doesn't wait for it. It says in the log that what is left of the ranks ends with the program.
        """
        return self.faults.over_s >= self.shutdown_s and any(
            each.kind == "restart gcs" for each in self.scenario.faults
        )


class Account:
    """Something that has to add up. Its methods only look: they wait for nothing, and change nothing of the product.

    `idle` and `stopped` are asked again for a while: only what is wrong all the time counts.
    """

    settles_s = 60.0
    """Virtual seconds within which nothing may be wrong any more when all callers are done, and all faults are over.
    Messages to ranks arrive within milliseconds, but a silent node is declared dead after 16 s."""
    is_of_clients = False
    """Whether `idle` is called with the engine of each API server, too."""
    ends_s = 90.0
    """The same after the engine's shutdown."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.problems: list[str] = []
        """What was wrong at one moment."""

    def begin(self, llm: AsyncLLM) -> None:
        """The engine is up. Called on the driver's main thread."""

    def output(self, record: Record, output: Any) -> None:
        """A caller gets this output. Called on the caller's thread."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        """What is wrong now that no caller waits for anything. On the driver's main thread."""
        return iter(())

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        """What is wrong after the engine's shutdown, while its program goes on. On the driver's main thread."""
        return iter(())

    def not_started(self) -> Iterator[str]:
        """What is wrong after the engine's start has failed, while its program goes on. On the driver's main thread."""
        return iter(())

    def over(self) -> Iterator[str]:
        """What is wrong some time after the driver's end."""
        return iter(())


def amounts_of_rank(llm: RunningEngine) -> dict[str, float]:
    """The resources that a rank reserves."""
    needed: dict[str, float] = {}
    for bundle in llm._manager._shape.bundles:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0.0) + amount
    return needed


class LiveRank(NamedTuple):
    """A rank that the client is connected to, and whose process runs."""

    connection: RankConnection
    process: Process
    actor: DPEngineCoreActor
    """The object in that process."""


def ranks_of(llm: RunningEngine) -> Iterator[LiveRank]:
    """The ranks of a client whose engine hasn't failed."""
    client = llm._client
    if client.failure is not None:
        return
    for connection in client._connections.all():
        handle: Any = connection.actor
        incarnation = handle._actor.incarnation
        if incarnation is None or handle._actor.is_dead:
            continue
        if not (incarnation.process.has_ended or incarnation.process.is_stopped):
            yield LiveRank(connection, incarnation.process, incarnation.instance)


def first_worker_of(rank: DPEngineCoreActor) -> Process | None:
    """The process of a rank's first worker. None: it has ended."""
    assert rank._core is not None, "it has started"
    executor: Any = rank._core.executor
    workers = getattr(executor, "_workers", None)
    incarnation = None if workers is None or not workers.actors else workers.actors[0]._actor.incarnation
    return None if incarnation is None or incarnation.process.has_ended else incarnation.process
