"""Finds the parts of a scheduler."""

from __future__ import annotations

from typing import TypeVar

from raycore.scheduler.part import SchedulerPart
from raycore.scheduler.scheduler import Scheduler

_PartT = TypeVar("_PartT", bound=SchedulerPart)


def parts_of(scheduler: Scheduler, kind: type[_PartT]) -> list[_PartT]:
    """The scheduler's parts of a class: one, or none."""
    return [part for part in scheduler.parts if isinstance(part, kind)]


def part_of(scheduler: Scheduler, kind: type[_PartT]) -> _PartT:
    """The scheduler's part of a class."""
    (part,) = parts_of(scheduler, kind)
    return part
