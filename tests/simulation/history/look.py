"""Runs seeds of a program: `python -m simulation.history.look PROGRAM SEED,SEED,...`, with options of the tool.

Prints a line of JSON for each. The control plane is the one on the path: a copy of the sources, with a fault or
without. With `--marks`, a line says which faults' places the seed has run, and otherwise the first failure ends it.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import msgspec

from simulation.apart import Died, run_apart
from simulation.history import marks
from simulation.history.programs import PLAYERS, Asked, Problems, put_in_place

ROOT = Path(__file__).parents[3]
_LIMIT_S = 300.0
"""Real seconds that a seed may take, on a machine that has other things to do."""


class Looked(msgspec.Struct, frozen=True):
    """What one seed has shown."""

    seed: int
    cpu_s: float
    problem: str = ""
    """Empty: none."""
    reached: tuple[str, ...] = ()
    """The commits of whose faults it has run a place."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PLAYERS)
    parser.add_argument("seeds")
    parser.add_argument("--marks", action="store_true")
    parser.add_argument("--at-statements", action="store_true")
    parser.add_argument("--deployment")
    given = parser.parse_args()
    mark = (lambda: marks.put(marks.of_faults(ROOT))) if given.marks else lambda: None
    problems_of = put_in_place(given.program, Asked(given.at_statements, given.deployment, mark))
    import raycore

    assert Path(raycore.__file__).is_relative_to(ROOT), f"{raycore.__file__} ran, and not the copy in {ROOT}"
    for seed in map(int, given.seeds.split(",")):
        looked = _look(problems_of, seed)
        print(msgspec.json.encode(looked).decode(), flush=True)
        if looked.problem and not given.marks:
            break


def _look(problems_of: Problems, seed: int) -> Looked:
    began_s = _children_s()
    outcome = run_apart(lambda: (problems_of(seed), tuple(marks.reached)), _LIMIT_S)
    problems, reached = ([outcome.reason], ()) if isinstance(outcome, Died) else outcome
    return Looked(seed, _children_s() - began_s, problems[0] if problems else "", reached)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
