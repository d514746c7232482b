"""Plays a scenario, and judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

from raycore.config import resolve
from raycore.demo import demo_model_path
from simulation.cluster.accounts import Accounts
from simulation.cluster.accounts.account import Run
from simulation.cluster.driver import OPTIONS, Driver
from simulation.cluster.faults import Faults
from simulation.cluster.judges import judged, left_by_driver
from simulation.cluster.records import Record, Recorder
from simulation.ray.cluster import Cluster
from simulation.scenario import Scenario
from simulation.world import threads
from simulation.world.kernel import Deadlock, OutOfTime, World
from simulation.world.own_state import OwnState

_LAST_S = 20_000.0
"""Virtual seconds that a run may take: no scenario has that much to do."""
_MAX_CHANGES = 3_000_000
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
    world = World(
        scenario.seed,
        scenario.pace,
        last_s=_LAST_S,
        max_changes=_MAX_CHANGES,
        num_free_changes=scenario.num_free_changes,
    )
    OwnState(world)
    records = [Record(number, request) for number, request in enumerate(scenario.requests)]
    recorder = Recorder(records, options=scenario.options)
    problems: list[str] = []
    cluster = Cluster(world)
    faults = Faults(scenario.faults, cluster, recorder)
    accounts = Accounts(Run(scenario, cluster, recorder, faults))

    def main() -> None:
        for amounts in scenario.nodes:
            cluster.add_node(**amounts)
        driver = cluster.drive("driver", Driver(scenario, recorder, accounts).run)
        faults.arm(driver)
        ended = threads.Event()
        driver.on_end.append(lambda _: ended.set())
        ended.wait()
        threads.world().park("what the driver has left to end", _AFTER_S)
        problems.extend(left_by_driver(cluster))

    try:
        world.run(main, "judge")
    except (Deadlock, OutOfTime) as error:
        problems.append(f"{type(error).__name__}: {error}")
    config = resolve(demo_model_path(), None, **OPTIONS | scenario.options)
    problems = [*judged(recorder, config, world), *accounts.over(), *problems]
    return Outcome(
        scenario.seed,
        problems,
        world.story,
        world.digest,
        world.now_s,
        world.num_changes,
        sum(len(sequence.tokens) for record in recorder.records for sequence in record.sequences),
        faults.cells,
    )
