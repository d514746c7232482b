"""What modules of circumstances have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simulation.scenario import Fault, Operation


@dataclass(frozen=True)
class Circumstance:
    """What a scenario has besides."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    operations: tuple[Operation, ...] = ()
    faults: tuple[Fault, ...] = ()
    exports_metrics: bool = False
    """See `Scenario.exports_metrics`."""

    def __add__(self, other: Circumstance) -> Circumstance:
        return Circumstance(
            self.options | other.options,
            self.operations + other.operations,
            self.faults + other.faults,
            self.exports_metrics or other.exports_metrics,
        )
