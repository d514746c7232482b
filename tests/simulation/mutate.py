"""Judges the judges: how many small faults in the control plane do seeds find?

    python -m tests.simulation.mutate --count 200 --draw 1 --seeds 500
    python -m tests.simulation.mutate --only client/group.py --seeds 100 --reached FILE

For each mutation of the draw, runs seeds that get there until one fails, and prints a line. Those that a run without
faults and operators finds, too, are told apart: nobody needs a simulated cluster for them. So are those where no seed
gets to, and those that are equal in meaning, which `equal_mutations.yaml` lists.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

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
    "raycore/parts/transfers/connectors/publisher.py": "it gives batches to ZeroMQ's sockets",
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


class Way(Enum):
    """How the control plane is imported for those who look."""

    PLAIN = "plain"
    AT_STATEMENTS = "threads change between any two statements"  # where a lock was, they change no more
    INTERRUPTED = "programs may be interrupted before any statement"

    def looks_for(self, mutation: Mutation) -> bool:
        return self is Way.INTERRUPTED or (mutation.kind == "a lock not taken") is (self is Way.AT_STATEMENTS)

    def runs(self, mutation: Mutation, seed: Seed) -> bool:
        return self.looks_for(mutation) and (seed.program == "interrupts") is (self is Way.INTERRUPTED)

    def install(self, mark: Callable[[], object] = lambda: None) -> None:
        """Import the control plane."""
        is_interrupted, asked = self is Way.INTERRUPTED, Asked(self is Way.AT_STATEMENTS, mark=mark)
        put_in_place("interrupts" if is_interrupted else "cluster", asked)
        for program in PLAYERS:  # forks find them imported
            if (program == "interrupts") is is_interrupted:
                PLAYERS[program](asked)


class Verdict(NamedTuple):
    """What has become of a mutation."""

    kind: str
    num_seeds: int
    """That have looked."""
    seed: Seed | None
    """The one that has found it."""
    said: str
    """What was wrong then, or why nobody looks."""


OPEN = ("no seed gets there", "survived")
"""Verdicts after which others may look."""


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
    equal = mutations.equal()
    wanted = [each for each in drawn if each.name not in equal]
    reached = _kept_seeds(given.reached, wanted, given.seeds, given.processes)
    verdicts = {each.name: Verdict("equal", 0, None, equal[each.name]) for each in drawn if each.name in equal}
    for way in Way:
        todo: list[tuple[Mutation, list[Seed], int]] = []
        for each in wanted:
            before = verdicts.get(each.name, Verdict(OPEN[0], 0, None, ""))
            own = [seed for seed in reached[each.name][: given.seeds] if way.runs(each, seed)]
            if way.looks_for(each) and before.kind in OPEN and (own or each.name not in verdicts):
                todo.append((each, own, before.num_seeds))
        found = run_apart(partial(_look_for_all, way, todo, given.processes), _MUTATION_S * (1 + len(todo)))
        if isinstance(found, Died):
            raise RuntimeError(found.reason)
        verdicts |= found
    for mutation in drawn:
        print(_line(mutation, verdicts[mutation.name]))
    kinds = Counter(each.kind for each in verdicts.values())
    num_hard = len(drawn) - kinds["without faults"] - kinds["equal"]
    print(dict(kinds))
    print(f"{kinds['found']} of {num_hard} that a run without faults doesn't find, and that aren't equal, are found")
    return 0


def _line(mutation: Mutation, verdict: Verdict) -> str:
    seeds = f" {verdict.num_seeds} seeds" if verdict.kind == "survived" else ""
    by = "" if verdict.seed is None else f" by {' '.join(str(each) for each in verdict.seed if each is not None)}"
    said = verdict.said.strip().splitlines()[-1] if verdict.said else ""
    return f"{verdict.kind}{seeds}{by}: line {mutation.line} of {mutation.name}\n    {said}"


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
    for way in (Way.PLAIN, Way.INTERRUPTED) if missing else ():
        work = partial(seeds_by_mutation, missing, number, num_processes, way)
        found = run_apart(work, _SEED_S * number)
        if isinstance(found, Died):
            raise RuntimeError(found.reason)
        for name, those in found.items():
            known[name] = [*known.get(name, []), *those]
    if file is not None:
        file.write_bytes(msgspec.json.encode(known))
    return known


def seeds_by_mutation(drawn: Sequence[Mutation], number: int, num_processes: int, way: Way) -> dict[str, list[Seed]]:
    """Which seeds run the place of each mutation, and find nothing as long as it isn't changed."""
    wanted: marks.Marks = {}
    for each in drawn:
        wanted.setdefault(each.module, []).append((range(each.line, each.line + 1), each.name))
    way.install(partial(marks.put, wanted))

    def reached_by(seed: Seed) -> set[str]:
        problems = _problems_of(seed)
        if problems:
            print(f"{seed} fails without a mutation: {problems[0]}", file=sys.stderr, flush=True)
        return set() if problems else marks.reached

    those = [each for each in seeds(number) if (each.program == "interrupts") is (way is Way.INTERRUPTED)]
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


def _look_for_all(
    way: Way, todo: Sequence[tuple[Mutation, Sequence[Seed], int]], num_processes: int
) -> dict[str, Verdict]:
    """By name: what becomes of mutations. Each has seeds that may look for it, and a number of those that have."""
    way.install()
    found: dict[str, Verdict] = {}
    works = ((mutation, partial(_look_honestly, mutation, seeds, num, way)) for mutation, seeds, num in todo)
    for mutation, verdict in run_all_apart(works, num_processes, _MUTATION_S):
        verdict = Verdict("not looked for", 0, None, verdict.reason) if isinstance(verdict, Died) else verdict
        found[mutation.name] = verdict
        print(_line(mutation, verdict), file=sys.stderr, flush=True)
    return found


def _look_honestly(mutation: Mutation, seeds: Sequence[Seed], num_before: int, way: Way) -> Verdict:
    """What becomes of a mutation, without the seeds that fail in this way without it, too."""
    while True:
        verdict = run_apart(partial(look, mutation, seeds, num_before, way), _MUTATION_S)
        if isinstance(verdict, Died):
            raise RuntimeError(verdict.reason)
        seed = verdict.seed
        if seed is None or way is not Way.AT_STATEMENTS or _first_problem(partial(_problems_of, seed, True)) is None:
            return verdict
        print(f"{seed} fails without a mutation", file=sys.stderr, flush=True)
        num_before, seeds = verdict.num_seeds - 1, seeds[seeds.index(seed) + 1 :]


def look(mutation: Mutation, seeds: Sequence[Seed], num_before: int, way: Way) -> Verdict:
    """What becomes of a mutation in the control plane that was imported in this way."""
    mutations.install(mutation)
    gc.freeze()  # forks don't touch, and so don't copy, what is there already
    from simulation.cluster.making import calm
    from simulation.cluster.play import play

    began_s = time.monotonic()
    problem = None if num_before else _first_problem(lambda: play(calm()).problems)
    if problem is not None:
        return Verdict("without faults", 0, None, problem)
    for count, seed in enumerate(seeds, 1):
        problem = _first_problem(partial(_problems_of, seed, way is Way.AT_STATEMENTS))
        if problem is not None:
            return Verdict("found", num_before + count, seed, problem)
        if time.monotonic() - began_s > _MUTATION_S - 2 * _SEED_S:
            return Verdict("survived", num_before + count, None, "for lack of time")
    num_seeds = num_before + len(seeds)
    return Verdict("survived" if num_seeds else "no seed gets there", num_seeds, None, "")


def _problems_of(seed: Seed, at_statements: bool = False) -> list[str]:
    return PLAYERS[seed.program](Asked(at_statements, seed.deployment))(seed.number)


def _first_problem(problems_of: Callable[[], list[str]]) -> str | None:
    ((_, problems),) = run_all_apart([(None, problems_of)], 1, _SEED_S)
    problems = [problems.reason] if isinstance(problems, Died) else problems
    return problems[0] if problems else None


if __name__ == "__main__":
    sys.exit(main())
