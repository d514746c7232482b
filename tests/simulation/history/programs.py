"""The programs of the simulated world that look for faults, each by a function from a seed to what is wrong."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulation.world import statements

Problems = Callable[[int], list[str]]


def _cluster(at_statements: bool, mark: Callable[[], None]) -> Problems:
    _change_imports(at_statements, mark)
    from simulation.installation import install

    install()
    from simulation.cluster.making import scenario_of
    from simulation.cluster.play import play

    return lambda seed: play(scenario_of(seed, at_statements=at_statements)).problems


def _kept(at_statements: bool, mark: Callable[[], None]) -> Problems:
    """The scenarios that were kept because they have found something: a seed is the number of a file."""
    _change_imports(at_statements, mark)
    from simulation.installation import install

    install()
    from simulation.cluster.play import play
    from simulation.scenario import from_json

    files = sorted((Path(__file__).parents[1] / "found").glob("*.json"))
    return lambda seed: play(from_json(files[seed].read_bytes())).problems if seed < len(files) else []


def _engine(at_statements: bool, mark: Callable[[], None]) -> Problems:
    from simulation.world import system

    system.install()
    if at_statements:
        statements.everywhere(["raycore.engine", "raycore.executor", "raycore.pending"])
    mark()
    from simulation.engine import scenario

    return lambda seed: scenario.run(seed).problems


def _ranks(at_statements: bool, mark: Callable[[], None]) -> Problems:
    _change_imports(at_statements, mark)
    from simulation import ranks

    return _played(ranks)


def _owners(at_statements: bool, mark: Callable[[], None]) -> Problems:
    _change_imports(at_statements, mark)
    from simulation import owners

    return _played(owners)


def _change_imports(at_statements: bool, mark: Callable[[], None]) -> None:
    if at_statements:
        from simulation.installation import PACKAGES

        statements.everywhere(PACKAGES)
    mark()
    logging.getLogger("raycore").setLevel(logging.CRITICAL)


def _played(module: Any) -> Problems:
    from simulation import program

    def problems(seed: int) -> list[str]:
        try:
            program.run(module.main, seed)
        except BaseException as error:
            return ["".join(traceback.format_exception(error))]
        return []

    return problems


PROGRAMS: dict[str, Callable[[bool, Callable[[], None]], Problems]] = {
    "cluster": _cluster,
    "kept": _kept,
    "engine": _engine,
    "ranks": _ranks,
    "owners": _owners,
}
"""By name: what puts the program's world in place. Arguments: whether threads change between any two statements, and
what is called just before the control plane is imported."""
