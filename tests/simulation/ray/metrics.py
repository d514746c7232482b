"""`ray.util.metrics`: what processes record, and Ray exports, if it exports metrics at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulation.ray.messages import Boundary, Message
from simulation.world.threads import world

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its tags."""


class Recorded:
    """All that the processes of a world have recorded."""

    def __init__(self) -> None:
        self.counters: dict[Sample, float] = {}
        self.gauges: dict[Sample, float] = {}
        self.refused: list[str] = []
        """What Ray refused to record."""


def recorded() -> Recorded:
    return world().systems.setdefault("metrics", Recorded())


class _Metric:
    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        if not isinstance(tag_keys, (tuple, type(None))):
            raise TypeError(f"tag_keys should be a tuple type, got: {type(tag_keys)}")
        self._name = name
        self._tag_keys = tag_keys or ()

    def _sample(self, call: str, value: Any, tags: dict[str, str] | None) -> Sample:
        here = world()
        process = here.current.process if here.current is not None else None
        error = here.systems["ray"].raised_at(Boundary.BEFORE, Message("metric", call, 8, process))
        if error is not None:
            raise error
        given = tags or {}
        for problem in self._problems(value, given):
            recorded().refused.append(f"{value} of {self._name} with {given}: {problem}")
            raise ValueError(problem)
        return self._name, tuple(sorted(given.items()))

    def _problems(self, value: Any, tags: dict[str, str]) -> Iterator[str]:
        if not isinstance(value, (int, float)):
            yield f"value must be int or float, got {type(value)}."
        if missing := [key for key in self._tag_keys if key not in tags]:
            yield f"Missing value for tag key(s): {','.join(missing)}."


class Counter(_Metric):
    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        sample, counters = self._sample("inc", value, tags), recorded().counters
        counters[sample] = counters.get(sample, 0.0) + value

    def _problems(self, value: Any, tags: dict[str, str]) -> Iterator[str]:
        yield from super()._problems(value, tags)
        if value <= 0:
            yield f"value must be >0, got {value}"


class Gauge(_Metric):
    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        recorded().gauges[self._sample("set", value, tags)] = value
