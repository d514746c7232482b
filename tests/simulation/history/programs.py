"""The programs of the simulated world that look for faults, each by a function from a seed to what is wrong."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.world import statements

Problems = Callable[[int], list[str]]


@dataclass(frozen=True)
class Asked:
    """How seeds are to be run."""

    at_statements: bool = False
    """Whether threads change between any two statements."""
    deployment: str | None = None
    """Which engines the whole cluster is to have: a capability of `cluster/deployments`. None: seeds decide."""
    mark: Callable[[], object] = lambda: None
    """Called just before the control plane is imported."""


def _cluster(asked: Asked) -> Problems:
    from simulation.cluster.making import scenario_of
    from simulation.cluster.play import play

    return lambda seed: play(scenario_of(seed, at_statements=asked.at_statements, capability=asked.deployment)).problems


def _kept(asked: Asked) -> Problems:
    """The scenarios that were kept because they have found something: a seed is the number of a file."""
    from simulation.cluster.play import play
    from simulation.scenario import from_json

    files = sorted((Path(__file__).parents[1] / "found").glob("*.json"))
    return lambda seed: play(from_json(files[seed].read_bytes())).problems if seed < len(files) else []


def _engine(asked: Asked) -> Problems:
    from simulation.engine import scenario

    return lambda seed: scenario.run(seed).problems


def _small(name: str) -> Callable[[Asked], Problems]:
    """A program that `simulation.program` runs."""
    return lambda asked: _played(importlib.import_module(f"simulation.{name}"))


def _played(module: Any) -> Problems:
    from simulation import program

    def problems(seed: int) -> list[str]:
        try:
            program.run(module.main, seed)
        except BaseException as error:
            return ["".join(traceback.format_exception(error))]
        return []

    return problems


PLAYERS: dict[str, Callable[[Asked], Problems]] = {
    "cluster": _cluster,
    "kept": _kept,
    "engine": _engine,
    **{
        name: _small(name)
        for name in (
            "ranks",
            "owners",
            "exits",
            "raising",
            "places",
            "budgets",
            "forks",
            "bereft",
            "calls",
            "interrupts",
        )
    },
}
"""By name: what plays the program's seeds, once the control plane has been imported in the simulated world."""


def put_in_place(name: str, asked: Asked) -> Problems:
    """Import the control plane as it is asked for, and return what plays a program's seeds."""
    if asked.at_statements:
        from simulation.installation import PACKAGES

        statements.everywhere(PACKAGES)
    asked.mark()
    if name == "interrupts":
        import simulation.interruptible  # noqa: F401 - it has to come before the control plane
    from simulation.installation import install

    install()
    return PLAYERS[name](asked)
