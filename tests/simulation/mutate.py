"""Judges the judges: how many small faults in the control plane do seeds find?

    python -m tests.simulation.mutate --count 200 --draw 1 --seeds 500

For each mutation of the draw, runs seeds that get there until one fails, and prints a line. Those that a run without
faults and operators finds, too, are told apart: nobody needs a simulated cluster for them. So are those where no seed
gets to.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation import mutations
from simulation.apart import Died, run_all_apart, run_apart
from simulation.history import marks
from simulation.installation import PACKAGES
from simulation.mutations import Mutation
from simulation.scenario import Scenario

ROOT = Path(__file__).parents[2]
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

    drawn = mutations.draw(list(paths()), ROOT, given.count, given.draw)
    reached = run_apart(partial(seeds_by_mutation, drawn, given.seeds, given.processes), _SEED_S * given.seeds)
    if isinstance(reached, Died):
        raise RuntimeError(reached.reason)
    found: Counter[str] = Counter()
    works = ((mutation, partial(look, mutation, reached[str(mutation)])) for mutation in drawn)
    for mutation, result in run_all_apart(works, given.processes, _MUTATION_S):
        verdict, seed, said = ("not looked for", None, result.reason) if isinstance(result, Died) else result
        found[verdict.partition(" seeds")[0].rstrip("0123456789 ")] += 1
        print(f"{verdict}, {seed}: {mutation}\n    {said.strip().splitlines()[-1] if said else ''}", flush=True)
    print(dict(found))
    return 0


def paths() -> Iterator[Path]:
    """What is mutated: the control plane. What needs torch is below the simulated workers' cut."""
    for name in PACKAGES:
        place = ROOT / name.replace(".", "/")
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            if not re.search(r"^(import|from) torch", path.read_text(), re.MULTILINE):
                yield path


def seeds_by_mutation(drawn: Sequence[Mutation], num_seeds: int, num_processes: int) -> dict[str, list[int]]:
    """Which seeds run the place of each mutation, and find nothing as long as it isn't changed."""
    wanted: marks.Marks = {}
    for each in drawn:
        wanted.setdefault(each.module, []).append((range(each.line, each.line + 1), str(each)))
    marks.put(wanted)
    from simulation.installation import install

    install()
    from simulation.cluster.making import scenario_of
    from simulation.cluster.play import play

    def reached_by(seed: int) -> set[str]:
        problems = play(scenario_of(seed)).problems
        return set() if problems else marks.reached

    works = ((seed, partial(reached_by, seed)) for seed in range(num_seeds))
    found: dict[str, list[int]] = {str(each): [] for each in drawn}
    for seed, reached in run_all_apart(works, num_processes, _SEED_S):
        for name in () if isinstance(reached, Died) else reached:
            found[name].append(seed)
    return {name: sorted(seeds) for name, seeds in found.items()}


def look(mutation: Mutation, seeds: Sequence[int]) -> tuple[str, int | None, str]:
    """How a mutation was found, by which seed, and what was wrong then."""
    mutations.install(mutation)
    at_statements = mutation.kind == "a lock not taken"  # where it was, threads change no more
    try:
        from simulation.installation import install

        install(at_statements=at_statements)
    except Exception as error:
        return "at import", None, repr(error)
    from simulation.cluster.making import calm, scenario_of

    began_s = time.monotonic()
    problem = _first_problem(calm())
    if problem is not None:
        return "without faults", None, problem[1]
    if not seeds:
        return "no seed gets there", None, ""
    for seed in seeds:
        problem = _first_problem(scenario_of(seed, at_statements=at_statements))
        if problem is not None:
            return "found", *problem
        if time.monotonic() - began_s > _MUTATION_S - 2 * _SEED_S:
            return "survived for lack of time", seed, ""
    return f"survived {len(seeds)} seeds", None, ""


def _first_problem(scenario: Scenario) -> tuple[int, str] | None:
    from simulation.cluster.play import play

    ((_, outcome),) = run_all_apart([(0, partial(play, scenario))], 1, _SEED_S)
    if isinstance(outcome, Died):
        return scenario.seed, outcome.reason
    return (scenario.seed, outcome.problems[0]) if outcome.problems else None


if __name__ == "__main__":
    sys.exit(main())
