"""What the programs have in common that put faults into the product, to show that seeds find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation.apart import Died, run_all_apart

if TYPE_CHECKING:
    from simulation.cluster.play import Outcome
    from simulation.scenario import Scenario

_SEED_S, _FAULT_S = 120.0, 1800.0
"""Real seconds that a scenario may take, and all that look for a fault."""


def substitute(owner: Any, name: str, value: Any) -> None:
    """Put a fault in the place of a function or method of the product."""
    assert hasattr(owner, name), f"the product has no {name} any more"
    setattr(owner, name, value)


def first_find(play: Callable[[Scenario], Outcome], scenarios: Iterable[Scenario]) -> str | None:
    """What the first of some scenarios says in which anything is wrong. None: nothing is.

    Raises:
        TimeoutError: it only takes too long, and so does each run of this test.
    """
    works = ((each.seed, partial(play, each)) for each in scenarios)
    for count, (seed, outcome) in enumerate(run_all_apart(works, 1, _SEED_S), 1):
        problems = [outcome.reason] if isinstance(outcome, Died) else outcome.problems
        if isinstance(outcome, Died) and outcome.is_late:
            raise TimeoutError(f"only the time shows the fault: seed {seed} is {outcome.reason}")
        if problems:
            return f"found by seed {seed}, the {count}th: {problems[0].strip().splitlines()[-1][:200]}"
    return None


def look_for_all(finds: Iterable[tuple[str, Callable[[], str | None]]]) -> int:
    """Look for each fault in a process of its own, and print what has found it.

    Args:
        finds: the names of faults, and what puts them in and returns `first_find()`.

    Returns: the exit status: 1 if a fault wasn't found.
    """
    num_missed = 0
    for name, found in run_all_apart(finds, 1, _FAULT_S):
        num_missed += not isinstance(found, str)
        print(f"{name}: {found.reason if isinstance(found, Died) else found or 'not found'}", flush=True)
    return bool(num_missed)
