"""Faults that are put into the product, to show that seeds with circumstances find them, and what their judges say.

    python -m simulation.cluster.circumstances.injected [--search] [FAULT ...]

with `tests` on the path. Plays for each the seed that is known to find it. With `--search`, looks for the first one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from simulation.installation import install
from simulation.putting_in import first_find, look_for_all, substitute

install()

from raycore.client.client import EngineClient  # noqa: E402
from raycore.client.receiver import Receiver  # noqa: E402
from raycore.control import program  # noqa: E402
from raycore.control.program import ControlThread  # noqa: E402
from raycore.engine import mailbox  # noqa: E402
from raycore.metrics import ray_export  # noqa: E402
from raycore.metrics.catalog import families  # noqa: E402
from raycore.metrics.periodic import Periodic  # noqa: E402
from raycore.metrics.ray_export import RayExport  # noqa: E402
from simulation.cluster.circumstances import raising  # noqa: E402
from simulation.cluster.making import scenario_of  # noqa: E402
from simulation.cluster.play import Outcome, play  # noqa: E402
from simulation.scenario import AtMessage, Scenario  # noqa: E402

_MOST_SEEDS = 40
Concerns = Callable[[Scenario], bool]


def clients_without_outputs_hear_of_no_loads() -> None:
    substitute(mailbox, "_has_as_many_requests", lambda load, told: True)


def the_status_of_a_start_is_published_late() -> None:
    def start(self: ControlThread) -> None:
        self._is_up = True
        if self._thread.ident is None:
            self._thread.start()

    substitute(ControlThread, "start", start)


def callers_elsewhere_are_told_nothing() -> None:
    substitute(program, "describe_death", lambda error: "")


def counters_are_exported_that_have_not_grown() -> None:
    original = RayExport.report

    def report(self: RayExport) -> None:
        original(self)
        for sample in list(self._last_counters)[:1]:
            self._metric("Counter", sample).inc(0.0, dict(sample[1]))

    substitute(RayExport, "report", report)


def no_counter_is_exported() -> None:
    substitute(ray_export, "families", lambda view: [each for each in families(view) if each.is_gauge])


def no_gauge_is_exported() -> None:
    substitute(ray_export, "families", lambda view: [each for each in families(view) if not each.is_gauge])


def what_a_report_has_recorded_before_it_failed_is_forgotten() -> None:
    original = RayExport.report

    def report(self: RayExport) -> None:
        before = dict(self._last_counters)
        try:
            original(self)
        except MemoryError:
            self._last_counters = before
            raise

    substitute(RayExport, "report", report)


def a_report_that_fails_is_the_last_one() -> None:
    def run(self: Periodic) -> None:
        while not self._stopping.wait(self._interval_s):
            self._action()

    substitute(Periodic, "_run", run)


def what_a_failed_submit_has_added_stays() -> None:
    substitute(EngineClient, "_abort", lambda self, request_ids: [])


def a_rank_whose_outputs_can_not_be_read_is_kept() -> None:
    original = Receiver._break

    def end(self: Any, source: Any, error: Exception) -> None:
        if isinstance(error, self._loss):
            original(self, source, error)
        else:
            self._end()

    substitute(Receiver, "_break", end)


def _raises(method: str) -> Concerns:
    return lambda scenario: any(
        fault.kind == raising.KIND and isinstance(fault.when, AtMessage) and fault.when.method == method
        for fault in scenario.faults
    )


FAULTS: dict[Callable[[], None], tuple[int, Concerns, str]] = {
    clients_without_outputs_hear_of_no_loads: (27, lambda scenario: True, "but a client takes it for"),
    the_status_of_a_start_is_published_late: (
        231,
        lambda scenario: "engine_name" in scenario.options,
        "others are told that it is starting",
    ),
    callers_elsewhere_are_told_nothing: (
        80,
        lambda scenario: any(each.kind == "call_from_elsewhere" for each in scenario.operations),
        "the engine refuses the call, and its caller is told",
    ),
    counters_are_exported_that_have_not_grown: (
        40,
        lambda scenario: scenario.exports_metrics,
        "Ray refused to record 0",
    ),
    no_gauge_is_exported: (40, lambda scenario: scenario.exports_metrics, "and Ray exports {}"),
    no_counter_is_exported: (40, lambda scenario: scenario.exports_metrics, "and Ray exports 0"),
    what_a_report_has_recorded_before_it_failed_is_forgotten: (355, _raises("inc"), "and Ray exports"),
    a_report_that_fails_is_the_last_one: (55, lambda scenario: scenario.exports_metrics, "raycore-ray-metrics raised"),
    what_a_failed_submit_has_added_stays: (13, _raises("submit"), "the client keeps"),
    a_rank_whose_outputs_can_not_be_read_is_kept: (131, _raises("outputs"), "never ended"),
}
"""A seed that finds it, the scenarios that can, and what is said of it."""


def _played(words: str, scenario: Scenario) -> Outcome:
    """Play, and keep the problem that names the fault."""
    outcome = play(scenario)
    outcome.problems = [each for each in outcome.problems if words in each]
    return outcome


def _scenarios(put_in: Callable[[], None], wants_search: bool) -> Iterator[Scenario]:
    known, concerns, _ = FAULTS[put_in]
    if not wants_search:
        return iter([scenario_of(known)])
    return itertools.islice(filter(concerns, map(scenario_of, itertools.count())), _MOST_SEEDS)


def _find(put_in: Callable[[], None], wants_search: bool) -> str | None:
    put_in()
    return first_find(partial(_played, FAULTS[put_in][2]), _scenarios(put_in, wants_search))


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation.cluster.circumstances.injected")
    parser.add_argument("faults", nargs="*", help="by default all")
    parser.add_argument("--search", action="store_true", help="look for the first seed that finds it")
    given = parser.parse_args()
    names = given.faults or [each.__name__ for each in FAULTS]
    return look_for_all(
        (each.__name__, partial(_find, each, given.search)) for each in FAULTS if each.__name__ in names
    )


if __name__ == "__main__":
    sys.exit(main())
