"""Hooks: methods by which parts add to an object that is composed of them, such as a scheduler.

A class of parts has all hooks, and its methods do nothing. A part overrides those that it needs. Its owner binds these
once, so what no part needs costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_ResultT = TypeVar("_ResultT")
_PartT = TypeVar("_PartT")


def overridden(
    parts: Iterable[object], hook: Callable[Concatenate[Any, _P], _ResultT]
) -> tuple[Callable[_P, _ResultT], ...]:
    """Return the methods with which parts override `hook`, a method of their base class. In the order of the parts."""
    return tuple(getattr(part, hook.__name__) for part in overriding(parts, hook))


def overriding(parts: Iterable[_PartT], hook: Callable[..., object]) -> tuple[_PartT, ...]:
    """Return the parts that override `hook`, a method of their base class."""
    return tuple(part for part in parts if getattr(type(part), hook.__name__) is not hook)
