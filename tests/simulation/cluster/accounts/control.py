"""The actor by which others reach an engine: if its process ends, the engine starts another one, but not at once.

Whatever has ended the first one may end the next one, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from simulation.cluster.accounts.account import Account
from simulation.cluster.faults import CONTROL

_PAUSE_S = 5.0
"""Virtual seconds between the end of one and the start of the next one at least. A process takes a second of CPU to
start."""


class Control(Account):
    """When Ray was asked for such actors."""

    def over(self) -> Iterator[str]:
        found: list[Any] = [each for each in self.run.cluster.gcs.actors.values() if each.class_name == CONTROL]
        for first, second in pairwise(sorted(found, key=lambda each: each.asked_s)):
            ended_s = None if first.incarnation is None else first.incarnation.worker.ended_s
            if ended_s is not None and second.asked_s - ended_s < _PAUSE_S:
                yield f"{first} ended at {ended_s:.2f} s, and another one was started at {second.asked_s:.2f} s"
