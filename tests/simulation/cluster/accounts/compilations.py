"""Constraints: workers begin to compile none that nobody wants any more."""

from __future__ import annotations

from collections.abc import Iterator

from simulation.cluster import kinds
from simulation.cluster.accounts.account import Account
from simulation.worker.compilations import compilations_of

_LATE_S = 1.0
"""Virtual seconds within which workers hear that a request has left. Its rank tells them between two steps."""


class Compilations(Account):
    """What workers have compiled."""

    def over(self) -> Iterator[str]:
        faults = self.run.faults
        for each in compilations_of(self.run.cluster.world):
            wanting = [
                record
                for record in self.run.recorder.records
                if kinds.asked(record.request).params.get("structured_outputs") == each.constraint
            ]
            left_s = max((record.ended_s or each.at_s for record in wanting), default=each.at_s)
            # a process that stands still hears nothing
            is_disturbed = faults.first_s <= each.at_s and left_s <= faults.over_s + self.settles_s
            if left_s + _LATE_S < each.at_s and not is_disturbed:
                names = ", ".join(record.name for record in wanting)
                yield f"{each.process} began to compile {each.at_s - left_s:.3f} s after the last of {names} had left"
