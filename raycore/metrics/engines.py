"""The engines of this process that have started, as far as something refers to them."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from raycore.metrics.snapshot import Metric


class Engine(Protocol):
    """An engine that has started."""

    name: str

    @property
    def unavailable_reason(self) -> str | None: ...

    def get_metrics(self) -> list[Metric]: ...


_engines: WeakSet[Engine] = WeakSet()


def add_engine(engine: Engine) -> None:
    """Have `get_metrics_snapshot()` tell of an engine while it runs."""
    _engines.add(engine)


def get_metrics_snapshot() -> list[Metric]:
    """The metrics of all engines that run in this process, as `LLM.get_metrics()` has those of one."""
    running = [each for each in list(_engines) if each.unavailable_reason is None]
    return [metric for each in sorted(running, key=lambda engine: engine.name) for metric in each.get_metrics()]
