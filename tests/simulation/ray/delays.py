"""How long everything takes in a simulated cluster. A seed has a fast or a slow cluster, with more or fewer delays."""

from __future__ import annotations

import random

UNNOTICED_S = (10.0, 16.0)
"""For how long Ray takes a node that has crashed for alive: least and most seconds."""


class Delays:
    """Draws delays, in seconds. Most are usual ones; some are long."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._scale = draws.choice([0.3, 1.0, 1.0, 4.0])
        self._share_of_long = draws.choice([0.0, 0.001, 0.01, 0.05])

    def _between(self, least_s: float, most_s: float, longest_s: float) -> float:
        draws = self._draws
        if draws.random() < self._share_of_long:
            return most_s + (longest_s - most_s) * draws.random()
        return (least_s + (most_s - least_s) * draws.random()) * self._scale

    def flush(self) -> float:
        """Until a message has left its process. If that ends before, the message is lost."""
        return self._between(1e-6, 1e-4, 1e-2)

    def network(self) -> float:
        """A message's way to another process, or back."""
        return self._between(5e-5, 5e-4, 0.2)

    def broken(self) -> float:
        """Until the peers of a process that ended see that their connection is broken."""
        return self._between(1e-3, 2e-2, 0.5)

    def notice(self) -> float:
        """Until Ray tells others what has happened to a process or an actor."""
        return self._between(5e-3, 4e-2, 2.0)

    def process_start(self) -> float:
        return self._between(0.3, 1.5, 12.0)

    def process_end(self) -> float:
        """Until a process that is asked to end has ended."""
        return self._between(1e-3, 3e-2, 1.0)

    def without_raylet(self) -> float:
        """Until a process ends whose raylet has ended."""
        return self._draws.uniform(0.1, 3.0 if self._draws.random() < 0.7 else 120.0)

    def group_step(self) -> float:
        """Until Ray has taken one more step to create a placement group."""
        return self._between(1e-3, 2e-2, 3.0)

    def resources_shown(self) -> float:
        """Until released resources are shown as free."""
        return self._draws.random()

    def unnoticed(self) -> float:
        """Until Ray declares a crashed node dead."""
        return self._draws.uniform(*UNNOTICED_S)
