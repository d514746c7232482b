"""Plays a scenario, and judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycore.config import resolve
from simulation import mistakes
from simulation.cluster.accounts import KINDS, Accounts
from simulation.cluster.accounts.account import Run
from simulation.cluster.anywhere import MODEL, same_paths
from simulation.cluster.deployments import offload
from simulation.cluster.deployments.servers import servers_of
from simulation.cluster.driver import OPTIONS, Driver
from simulation.cluster.faults import Faults
from simulation.cluster.judges import judged, left_by_driver, of_workers, outlived, raised, replaced
from simulation.heard import Logged, heard
from simulation.ray.cluster import Cluster
from simulation.scenario import Scenario
from simulation.worker.steps import steps_of
from simulation.world import threads
from simulation.world.kernel import Deadlock, OutOfTime, Process, World
from simulation.world.own_state import OwnState

_LAST_S = 20_000.0
"""Virtual seconds that a run may take: no scenario has that much to do."""
_MAX_CHANGES = 3_000_000
_DELAYING = frozenset({"stall gcs", "restart gcs", "node stands still", "stop engine"})
"""Faults in which killed processes end late."""
_AFTER_S = 60.0
"""Virtual seconds after the end of the driver within which all must be gone: Ray declares silent nodes dead before."""


@dataclass
class Outcome:
    """What came of a scenario."""

    seed: int
    problems: list[str]
    story: list[tuple[float, str, str]]
    digest: str
    virtual_s: float
    num_changes: int
    num_tokens: int
    cells: set[tuple[str, str, str]] = field(default_factory=set)
    """(kind of request, kind of fault, boundary): what was there when something broke."""


def play(scenario: Scenario) -> Outcome:
    """Run a scenario in a world of its own. At most one runs in a process."""
    with same_paths(), offload.with_directory(scenario) as scenario, heard() as logged:
        return _play(scenario, logged)


def _play(scenario: Scenario, logged: list[Logged]) -> Outcome:
    world = World(
        scenario.seed,
        scenario.pace,
        last_s=_LAST_S,
        max_changes=_MAX_CHANGES,
        num_free_changes=scenario.num_free_changes,
    )
    OwnState(world)
    world.systems["directory of blocks"] = offload.directory_of(scenario)
    servers = list(servers_of(scenario))
    problems: list[str] = []
    cluster = Cluster(world)
    cluster.exports_metrics = scenario.exports_metrics
    cluster.late_calls = scenario.late_calls
    faults = Faults(scenario.faults, cluster, servers)
    # of several engines, an account would take the one's for the other's
    kinds = KINDS if len(servers) == 1 else ()
    accounts = [Accounts(Run(each.scenario, cluster, each.recorder, faults, logged), kinds) for each in servers]
    drivers = [Driver(each.scenario, each.recorder, own) for each, own in zip(servers, accounts, strict=True)]
    if scenario.num_api_servers:
        drivers[0].listen(world)

    def main() -> None:
        for amounts in scenario.nodes:
            cluster.add_node(**amounts)
        all_ended = threads.Event()

        def look(_: Process) -> None:
            if all(each.process is not None and each.process.has_ended for each in servers):
                all_ended.set()

        for index, each in enumerate(servers):
            node = cluster.nodes[index % len(cluster.nodes)]
            each.process = cluster.drive(each.name, drivers[index].run, node)
            each.process.on_end.append(look)
        faults.arm()
        all_ended.wait()
        threads.world().park("what the driver has left to end", _AFTER_S)
        problems.extend(left_by_driver(cluster))

    try:
        world.run(main, "judge")
    except (Deadlock, OutOfTime) as error:
        problems.append(f"{type(error).__name__}: {error}")
    problems = [*(problem for each in accounts for problem in each.over()), *problems]
    problems = [*of_workers(world, faults.first_s), *replaced(cluster, scenario), *problems]
    if all(each.kind not in _DELAYING for each in scenario.faults):
        problems += outlived(cluster)
    for each in servers:
        if not each.is_lost:
            config = resolve(MODEL, None, **OPTIONS | each.scenario.options)
            steps = [step for step in steps_of(world) if cluster.driver_of(step.process) is each.process]
            struck_s = [at_s for at_s, _ in faults.struck]
            problems = [*judged(each.recorder, each.scenario, config, steps, struck_s), *problems]
    problems = [*raised(world), *mistakes.of(world), *problems, *offload.problems(scenario)]
    return Outcome(
        scenario.seed,
        problems,
        world.story,
        world.digest,
        world.now_s,
        world.num_changes,
        sum(
            len(sequence.tokens)
            for each in servers
            for record in each.recorder.records
            for sequence in record.sequences
        ),
        faults.cells,
    )
