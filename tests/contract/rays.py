"""The table of Ray's behaviours on which raycore depends: what a row is, and which Ray a scenario meets.

A scenario is a function of a Ray: `installed_ray` or `simulated_ray`, which have the same names. Its outcome is
compared by its text. A real Ray shows one of the outcomes that a row admits, the simulated one shows all of them, each
in some seeds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Scenario = Callable[[Any], object]

LONG_S = 90.0
"""Longer than anything takes. Only what hangs takes as long."""


@dataclass(frozen=True)
class Row:
    scenario: Scenario
    admits: tuple[str, ...]
    """The texts of the outcomes that there may be."""
    seldom: tuple[str, ...] = ()
    """Outcomes that may be, and that the simulated Ray need not show in a few seeds."""
    source: tuple[str, str] | None = None
    """For what no real Ray can be made to show: a file of the installed Ray, and what it says there."""
    needs_state: bool = False
    """Whether the control store has to keep its state in files."""
    is_slow: bool = False
    """Whether a real Ray takes many seconds for it."""

    @property
    def name(self) -> str:
        return self.scenario.__name__


def row_in(table: list[Row]) -> Callable[..., Callable[[Scenario], Scenario]]:
    """A decorator that makes a scenario a row of `table`. Its arguments: the outcomes."""

    def row(*admits: object, seldom: tuple[object, ...] = (), **options: Any) -> Callable[[Scenario], Scenario]:
        def add(scenario: Scenario) -> Scenario:
            table.append(Row(scenario, tuple(map(repr, admits)), tuple(map(repr, seldom)), **options))
            return scenario

        return add

    return row


def here() -> Any:
    """The Ray of the process that asks, which may be an actor's."""
    kernel = sys.modules.get("simulation.world.kernel")
    is_simulated = kernel is not None and kernel.the_world is not None
    return importlib.import_module("simulated_ray" if is_simulated else "installed_ray")


def eventually(look: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> Any:
    """The first value of `look()` that is true. Raises AssertionError with `what` if there is none in time."""
    ray = here()
    deadline_s = ray.now_s() + timeout_s
    while not (value := look()):
        assert ray.now_s() < deadline_s, what
        ray.sleep(0.01)
    return value


def error_of(ref: Any, timeout_s: float = LONG_S) -> Exception:
    """What a call's result raises."""
    try:
        value = here().get(ref, timeout=timeout_s)
    except Exception as error:
        return error
    raise AssertionError(f"no error, but {value!r}")


def kind(error: BaseException) -> str:
    return type(error).__name__


def outcome(ref: Any, timeout_s: float = LONG_S) -> object:
    """A call's value, or the name of what it raises."""
    try:
        return here().get(ref, timeout=timeout_s)
    except Exception as error:
        return kind(error)
