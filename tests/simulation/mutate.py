"""Judges the judges: how many small faults in the control plane do seeds find?

    python -m tests.simulation.mutate --count 200 --draw 1 --seeds 500

For each mutation of the draw, runs seeds until one fails, and prints a line. Those that a run without faults and
operators finds, too, are told apart: nobody needs a simulated cluster for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import mutations
from simulation.apart import Died, run_all_apart
from simulation.mutations import Mutation
from simulation.scenario import Scenario

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "placement raycore/client raycore/cluster raycore/control raycore/engine raycore/executor raycore/scheduler "
    "raycore/speculation raycore/kvcache raycore/rpc raycore/running_engine.py raycore/llm.py raycore/recurring.py "
    "raycore/pending.py"
)
"""What is mutated: the packages that the scenarios of today reach."""
_SEED_S, _MUTATION_S = 60.0, 3600.0
"""Real seconds that a seed and a mutation may take."""


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.simulation.mutate", description=__doc__, formatter_class=plain)
    parser.add_argument("--count", type=int, default=200, help="how many mutations")
    parser.add_argument("--draw", type=int, default=1, help="which mutations are drawn")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds may look for each")
    parser.add_argument("--processes", type=int, default=1, help="how many mutations are looked for at a time")
    given = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    import simulation.ray.modules  # noqa: F401 - Ray's exceptions take long to import

    paths = [path for name in PACKAGES.split() for path in _files(ROOT / name)]
    drawn = mutations.draw(paths, ROOT, given.count, given.draw)
    found: Counter[str] = Counter()
    works = ((mutation, partial(look, mutation, given.seeds)) for mutation in drawn)
    for mutation, result in run_all_apart(works, given.processes, _MUTATION_S):
        verdict, seed, said = ("not looked for", None, result.reason) if isinstance(result, Died) else result
        found[verdict] += 1
        print(f"{verdict}, {seed}: {mutation}\n    {said.strip().splitlines()[-1] if said else ''}", flush=True)
    print(dict(found))
    return 0


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def look(mutation: Mutation, num_seeds: int) -> tuple[str, int | None, str]:
    """How a mutation was found, by which seed, and what was wrong then."""
    mutations.install(mutation)
    try:
        from simulation.installation import install

        install()
    except Exception as error:
        return "at import", None, repr(error)
    from simulation.cluster.making import calm, scenario_of

    began_s = time.monotonic()
    problem = _first_problem(calm())
    if problem is not None:
        return "without faults", None, problem[1]
    for seed in range(num_seeds):
        problem = _first_problem(scenario_of(seed))
        if problem is not None:
            return "found", *problem
        if time.monotonic() - began_s > _MUTATION_S - 2 * _SEED_S:
            return "survived for lack of time", seed, ""
    return "survived", None, ""


def _first_problem(scenario: Scenario) -> tuple[int, str] | None:
    from simulation.cluster.play import play

    ((_, outcome),) = run_all_apart([(0, partial(play, scenario))], 1, _SEED_S)
    if isinstance(outcome, Died):
        return scenario.seed, outcome.reason
    return (scenario.seed, outcome.problems[0]) if outcome.problems else None


if __name__ == "__main__":
    sys.exit(main())
