"""Runs seeds of the simulated cluster.

    python -m tests.simulation --seed 7             tells the seed's story
    python -m tests.simulation --seed 7 --shrink    and makes it as small as it can be while it fails
    python -m tests.simulation --seeds 0 1000       runs many, and tells of those that fail
    python -m tests.simulation --minutes 10         explores, and shows which faults have met which requests
    python -m tests.simulation --file FILE          runs the scenario of a file

With `--at-statements`, threads change between any two statements of the control plane. Seeds are other ones then.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.apart import Died, run_all_apart, run_apart
from simulation.scenario import Scenario, from_json, to_json
from simulation.shrinking import shrink

if TYPE_CHECKING:
    from simulation.cluster.play import Outcome

_LIMIT_S = 120.0
"""Real seconds that a seed may take."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="one seed, whose story is told")
    what.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="many seeds")
    what.add_argument("--minutes", type=float, help="explore for so long, from a random seed on")
    what.add_argument("--file", type=Path, help="the scenario in a file, whose story is told")
    parser.add_argument("--shrink", action="store_true", help="make what fails smaller, and print it as a file")
    parser.add_argument("--at-statements", action="store_true", help="change threads between any two statements")
    parser.add_argument("--deployment", help="only engines of this kind: a capability of cluster/deployments")
    parser.add_argument("--processes", type=int, default=1, help="how many seeds run at a time")
    parser.add_argument("--digests", action="store_true", help="print the hash of each seed's story")
    given = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:
        # sets of strings go by their hashes
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    scenario = None if given.file is None else from_json(given.file.read_bytes())
    at_statements = given.at_statements or (scenario is not None and scenario.at_statements)
    from simulation.installation import install

    install(at_statements=at_statements)
    from simulation.cluster import deployments, making

    names = (deployments.PLAIN, *deployments.CAPABILITIES)
    if given.deployment not in (None, *names):
        parser.error(f"--deployment {given.deployment}: it is one of {', '.join(names)}")
    scenario_of = partial(making.scenario_of, at_statements=at_statements, capability=given.deployment)
    if given.seed is not None:
        scenario = scenario_of(given.seed)
    if scenario is not None:
        return _tell(scenario, given.shrink)
    if given.seeds is not None:
        seeds: Iterable[int] = range(*given.seeds)
        until_s = float("inf")
    else:
        first = int.from_bytes(os.urandom(4), "big")
        print(f"explores from seed {first} on")
        seeds = itertools.count(first)
        until_s = time.monotonic() + 60 * given.minutes
    scenarios = (scenario_of(seed) for seed in itertools.takewhile(lambda _: time.monotonic() < until_s, seeds))
    return _run_all(scenarios, given.processes, given.digests, show_cells=given.minutes is not None)


def _played(scenario: Scenario) -> Outcome | Died:
    from simulation.cluster.play import play

    return run_apart(partial(play, scenario), _LIMIT_S)


def _tell(scenario: Scenario, wants_small: bool) -> int:
    outcome = _played(scenario)
    if wants_small and _problems(outcome):
        kind = _kind(_problems(outcome)[0])
        scenario = shrink(scenario, lambda each: kind in map(_kind, _problems(_played(each))))
        outcome = _played(scenario)
    if not isinstance(outcome, Died):
        width = max((len(who) for _, who, _ in outcome.story), default=0)
        for at_s, who, what in outcome.story:
            print(f"{at_s:12.6f}  {who:{width}}  {what}")
        print(_summary(outcome))
    for problem in _problems(outcome):
        print(f"WRONG: {problem}")
    if wants_small and _problems(outcome):
        print(to_json(scenario))
    return bool(_problems(outcome))


def _problems(outcome: Outcome | Died) -> list[str]:
    return [outcome.reason] if isinstance(outcome, Died) else outcome.problems


def _kind(problem: str) -> str:
    """What a problem has in common with others of its kind: how its last line begins, without names and numbers."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*|_\w+", "", problem.strip().splitlines()[-1]).partition(":")[0]


def _summary(outcome: Outcome) -> str:
    return (
        f"seed {outcome.seed}: {outcome.num_tokens} tokens, {outcome.virtual_s:.1f} virtual s, "
        f"{outcome.num_changes} changes of threads, digest {outcome.digest[:16]}"
    )


def _run_all(scenarios: Iterable[Scenario], processes: int, wants_digests: bool, *, show_cells: bool) -> int:
    from simulation.cluster.play import play

    began_s, num_seeds, num_failed = time.monotonic(), 0, 0
    cells: Counter[tuple[str, str, str]] = Counter()
    works = ((scenario.seed, partial(play, scenario)) for scenario in scenarios)
    for seed, outcome in run_all_apart(works, processes, _LIMIT_S):
        num_seeds += 1
        problems = _problems(outcome)
        if problems:
            num_failed += 1
            print(f"seed {seed}:", *problems, sep="\n  ", flush=True)
        if not isinstance(outcome, Died):
            cells.update(outcome.cells)
            if wants_digests:
                print(f"{seed} {outcome.digest}")
    took_s = time.monotonic() - began_s
    print(f"{num_seeds} seeds, {num_failed} failed, {num_seeds / took_s * 3600:.0f} seeds an hour")
    if show_cells:
        _print_cells(cells)
    return bool(num_failed)


def _print_cells(cells: Counter[tuple[str, str, str]]) -> None:
    """A table for each kind of fault: kinds of requests by boundaries, with the number of seeds."""
    requests, boundaries = (sorted({cell[place] for cell in cells}) for place in (0, 2))
    for fault in sorted({cell[1] for cell in cells}):
        print(f"\n{fault:18}", *(f"{boundary:>18}" for boundary in boundaries))
        for request in requests:
            print(f"  {request:16}", *(f"{cells[request, fault, boundary]:18}" for boundary in boundaries))


if __name__ == "__main__":
    sys.exit(main())
