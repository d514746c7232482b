"""Judges the judges: how many small faults in the control plane do seeds find?

    python -m tests.simulation.mutate --count 200 --draw 1 --seeds 500
    python -m tests.simulation.mutate --only client/group.py --seeds 100 --reached FILE

For each mutation of the draw, runs seeds that get there until one fails, and prints a line. Those that a run without
faults and operators finds, too, are told apart: nobody needs a simulated cluster for them. So are those where no seed
gets to, and those that are equal in meaning, which `equal_mutations.yaml` lists.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from simulation import mutations
from simulation.apart import Died, run_all_apart, run_apart
from simulation.history import marks
from simulation.history.programs import PLAYERS, Asked, put_in_place
from simulation.installation import PACKAGES
from simulation.mutations import Mutation

ROOT = Path(__file__).parents[2]
_SEED_S, _MUTATION_S = 60.0, 3600.0
"""Real seconds that a seed and a mutation may take."""
_SHARE_OF_OTHERS = 8
"""How many times more seeds the whole cluster gets than each other program, and each of its deployments."""

_NOT_SIMULATED = {
    "raycore/cluster/joining.py": "a computer joins the cluster by starting a Ray",
    "raycore/cluster/local_ray": "the simulated Ray is there from the start",
    "raycore/kv_transfer/publisher.py": "it gives batches to ZeroMQ's sockets",
    "raycore/rpc/channel.py": "the workers are called by actor calls, and not through channels",
    "raycore/rpc/doorbell.py": "it wakes those who wait for channels",
}
"""Files and folders that no seed can run, and why."""


class Seed(NamedTuple):
    """What may look."""

    program: str
    deployment: str | None
    """See `Asked.deployment`."""
    number: int


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.simulation.mutate", description=__doc__, formatter_class=plain)
    parser.add_argument("--count", type=int, default=200, help="how many mutations")
    parser.add_argument("--draw", type=int, default=1, help="which mutations are drawn")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those of the draw whose names contain any of these")
    parser.add_argument("--skip", nargs="+", metavar="TEXT", default=[], help="and none of these")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds may look for each")
    parser.add_argument("--processes", type=int, default=1, help="how many mutations are looked for at a time")
    parser.add_argument("--reached", type=Path, metavar="FILE", help="keeps which seeds get where")
    given = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    import simulation.ray.modules  # noqa: F401 - Ray's exceptions take long to import

    drawn = [
        each
        for each in mutations.draw(list(paths()), ROOT, given.count, given.draw)
        if (given.only is None or any(text in each.name for text in given.only))
        and not any(text in each.name for text in given.skip)
    ]
    verdicts: Counter[str] = Counter()
    equal = mutations.equal()
    wanted = [each for each in drawn if each.name not in equal]
    for mutation in drawn:
        if mutation.name in equal:
            _tell(verdicts, mutation, "equal", None, equal[mutation.name])
    reached = _kept_seeds(given.reached, wanted, given.seeds, given.processes)
    works = ((mutation, partial(look, mutation, reached[mutation.name][: given.seeds])) for mutation in wanted)
    for mutation, result in run_all_apart(works, given.processes, _MUTATION_S):
        _tell(verdicts, mutation, *(("not looked for", None, result.reason) if isinstance(result, Died) else result))
    print(dict(verdicts))
    num_hard = sum(verdicts.values()) - verdicts["without faults"] - verdicts["at import"] - verdicts["equal"]
    print(f"{verdicts['found']} of {num_hard} that take more than a run without faults are found")
    return 0


def _tell(verdicts: Counter[str], mutation: Mutation, verdict: str, seed: Seed | None, said: str) -> None:
    verdicts[verdict.partition(" seeds")[0].rstrip("0123456789 ")] += 1
    by = "" if seed is None else f" by {' '.join(str(each) for each in seed if each is not None)}"
    line = said.strip().splitlines()[-1] if said else ""
    print(f"{verdict}{by}: {mutation.path}:{mutation.line}: {mutation.name}\n    {line}", flush=True)


def paths() -> Iterator[Path]:
    """What is mutated: the control plane, down to what the world simulates. Below it are workers, which need torch."""
    for name in PACKAGES:
        place = ROOT / name.replace(".", "/")
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            is_below = any(path.is_relative_to(ROOT / each) for each in _NOT_SIMULATED)
            if not is_below and not re.search(r"^(import|from) torch", path.read_text(), re.MULTILINE):
                yield path


def seeds(number: int) -> Iterator[Seed]:
    """Those that may look: so many of the whole cluster, and fewer of each deployment and of each other program."""
    from simulation.cluster.deployments import CAPABILITIES  # imported lazily: it imports some of the product

    fewer = range(-(-number // _SHARE_OF_OTHERS))
    yield from (Seed("cluster", None, each) for each in range(number))
    yield from (Seed("cluster", deployment, each) for deployment in CAPABILITIES for each in fewer)
    yield from (Seed(program, None, each) for program in PLAYERS if program != "cluster" for each in fewer)


def _kept_seeds(
    file: Path | None, wanted: Sequence[Mutation], number: int, num_processes: int
) -> dict[str, list[Seed]]:
    """`seeds_by_mutation()`, as far as a file doesn't know it."""
    is_there = file is not None and file.exists()
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, list[Seed]]) if is_there else {}
    missing = [each for each in wanted if each.name not in known]
    for is_interrupted in (False, True) if missing else ():
        work = partial(seeds_by_mutation, missing, number, num_processes, is_interrupted)
        found = run_apart(work, _SEED_S * number)
        if isinstance(found, Died):
            raise RuntimeError(found.reason)
        for name, those in found.items():
            known[name] = [*known.get(name, []), *those]
    if file is not None:
        file.write_bytes(msgspec.json.encode(known))
    return known


def seeds_by_mutation(
    drawn: Sequence[Mutation], number: int, num_processes: int, is_interrupted: bool
) -> dict[str, list[Seed]]:
    """Which seeds run the place of each mutation, and find nothing as long as it isn't changed.

    `is_interrupted`: those of `interrupts`, which needs a process of its own, or all others.
    """
    wanted: marks.Marks = {}
    for each in drawn:
        wanted.setdefault(each.module, []).append((range(each.line, each.line + 1), each.name))
    _install(is_interrupted, mark=partial(marks.put, wanted))

    def reached_by(seed: Seed) -> set[str]:
        problems = _problems_of(seed)
        if problems:
            print(f"{seed} fails without a mutation: {problems[0]}", file=sys.stderr, flush=True)
        return set() if problems else marks.reached

    those = [each for each in seeds(number) if (each.program == "interrupts") is is_interrupted]
    works = ((seed, partial(reached_by, seed)) for seed in those)
    found: dict[str, list[Seed]] = {each.name: [] for each in drawn}
    for seed, reached in run_all_apart(works, num_processes, _SEED_S):
        for name in () if isinstance(reached, Died) else reached:
            found[name].append(seed)
    return {name: _in_turns(each) for name, each in found.items()}


def _in_turns(those: Sequence[Seed]) -> list[Seed]:
    """Seeds of each program and deployment in turns."""
    by_kind: dict[tuple[str, str | None], list[Seed]] = {}
    for each in sorted(those, key=lambda seed: seed.number):
        by_kind.setdefault((each.program, each.deployment), []).append(each)
    return [each for turn in zip_longest(*by_kind.values()) for each in turn if each is not None]


def look(mutation: Mutation, those: Sequence[Seed]) -> tuple[str, Seed | None, str]:
    """How a mutation was found, by which seed, and what was wrong then."""
    interrupted = [each for each in those if each.program == "interrupts"]
    others = [each for each in those if each.program != "interrupts"]
    result = run_apart(partial(_look, mutation, others, False), _MUTATION_S)
    if isinstance(result, Died):
        raise RuntimeError(result.reason)
    verdict, _, _ = result
    if not interrupted or not verdict.startswith(("survived", "no seed")):
        return result
    second = run_apart(partial(_look, mutation, interrupted, True), _MUTATION_S)
    if isinstance(second, Died):
        raise RuntimeError(second.reason)
    return (f"survived {len(those)} seeds", None, "") if second[0].startswith("survived") else second


def _look(mutation: Mutation, those: Sequence[Seed], is_interrupted: bool) -> tuple[str, Seed | None, str]:
    mutations.install(mutation)
    # where a lock was, threads change no more
    at_statements = mutation.kind == "a lock not taken" and not is_interrupted
    try:
        _install(is_interrupted, at_statements=at_statements)
    except Exception as error:
        return "at import", None, repr(error)
    from simulation.cluster.making import calm
    from simulation.cluster.play import play

    began_s = time.monotonic()
    problem = _first_problem(lambda: play(calm()).problems)
    if problem is not None:
        return "without faults", None, problem
    for seed in those:
        problem = _first_problem(partial(_problems_of, seed, at_statements))
        if problem is not None:
            return "found", seed, problem
        if time.monotonic() - began_s > _MUTATION_S - 2 * _SEED_S:
            return "survived for lack of time", seed, ""
    return (f"survived {len(those)} seeds" if those else "no seed gets there"), None, ""


def _install(is_interrupted: bool, *, at_statements: bool = False, mark: Callable[[], object] = lambda: None) -> None:
    put_in_place("interrupts" if is_interrupted else "cluster", Asked(at_statements, mark=mark))


def _problems_of(seed: Seed, at_statements: bool = False) -> list[str]:
    return PLAYERS[seed.program](Asked(at_statements, seed.deployment))(seed.number)


def _first_problem(problems_of: Callable[[], list[str]]) -> str | None:
    ((_, problems),) = run_all_apart([(None, problems_of)], 1, _SEED_S)
    problems = [problems.reason] if isinstance(problems, Died) else problems
    return problems[0] if problems else None


if __name__ == "__main__":
    sys.exit(main())
