"""Runs seeds: `python -m simulation.engine --seeds 0 100`, with `tests` on the path."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

from simulation.world import statements, system

system.install()
if "--statements" in sys.argv:
    statements.everywhere(["raycore.engine", "raycore.executor", "raycore.rpc.pending"])

from simulation.apart import Died, run_all_apart  # noqa: E402
from simulation.engine import faults, scenario  # noqa: E402
from simulation.worker import grammar  # noqa: E402

grammar.install()

_LIMIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation.engine", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed, and tell its story")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="run many, each in a process")
    parser.add_argument("--faults", nargs="*", choices=faults.FAULTS, help="look for these faults, by default all")
    parser.add_argument("--processes", type=int, default=1, help="how many run at a time")
    parser.add_argument("--statements", action="store_true", help="let threads change between any two statements")
    parser.add_argument("--digests", action="store_true", help="print each seed's digest")
    given = parser.parse_args()
    if given.seed is not None:
        for name in given.faults or ():
            faults.FAULTS[name]()
        outcome = scenario.run(given.seed)
        print("\n".join(outcome.story))
        _print(outcome)
        return bool(outcome.problems)
    seeds = range(*given.seeds)
    if given.faults is not None:
        return _look_for_faults(given.faults or list(faults.FAULTS), seeds, given.processes)
    return _run(seeds, given.processes, prints_all=given.digests)


def _run(seeds: range, num_processes: int, *, prints_all: bool) -> int:
    """Run each seed in a process. Returns whether one has failed."""
    began_s, num_failed, num_steps = time.perf_counter(), 0, 0
    works = ((seed, partial(scenario.run, seed)) for seed in seeds)
    for seed, outcome in run_all_apart(works, num_processes, _LIMIT_S):
        if isinstance(outcome, Died):
            print(f"seed {seed}: {outcome.reason}")
            num_failed += 1
            continue
        num_steps += outcome.num_steps
        num_failed += bool(outcome.problems)
        if outcome.problems or prints_all:
            _print(outcome)
    took_s = time.perf_counter() - began_s
    rates = f"{len(seeds) / took_s:.1f} seeds/s, {num_steps / took_s:.0f} steps/s"
    print(f"{len(seeds)} seeds, {num_failed} failed, {num_steps} steps, {rates}")
    return bool(num_failed)


def _look_for_faults(names: list[str], seeds: range, num_processes: int) -> int:
    """For each fault, run seeds until one shows it. Returns whether a fault wasn't found."""
    works = ((name, partial(_find, name, seeds)) for name in names)
    num_missed = 0
    for name, found in run_all_apart(works, num_processes, _LIMIT_S):
        num_missed += found is None
        print(f"{name}: {'not found' if found is None else found.reason if isinstance(found, Died) else found}")
    return bool(num_missed)


def _find(name: str, seeds: range) -> str | None:
    faults.FAULTS[name]()
    for seed in [*([faults.KNOWN[name]] if name in faults.KNOWN else []), *seeds]:
        problems = scenario.run(seed).problems
        if problems:
            return f"seed {seed}: {problems[0][:300]}"
    return None


def _print(outcome: scenario.Outcome) -> None:
    print(
        f"seed {outcome.seed}: {outcome.num_requests} requests, {outcome.num_tokens} tokens, "
        f"{outcome.num_steps} steps, {outcome.num_changes} changes, digest {outcome.digest[:16]}"
    )
    for problem in outcome.problems:
        print(f"  {problem}")


if __name__ == "__main__":
    sys.exit(main())
