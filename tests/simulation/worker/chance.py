"""What a worker draws by chance: how long things take, and what is in memory that nobody has written."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from raycore.system import time
from simulation.worker.numbers64 import Words
from simulation.world import kernel

_LONG_SHARE, _LONG_FACTOR = 0.01, 50.0


def speed_of(purpose: str, factors: Sequence[float]) -> float:
    """How much longer something takes than usual in this world. Outside of a world: 1."""
    world = kernel.the_world
    return 1.0 if world is None else world.generator(purpose).choice(factors)


class Chance:
    """The chance of one worker. Outside of a world, nothing takes time."""

    def __init__(self, purpose: str) -> None:
        world = kernel.the_world
        self._is_simulated = world is not None
        self._random = random.Random(0) if world is None else world.generator(purpose)

    def duration_s(self, mean_s: float) -> float:
        """How long something takes: now and then much longer."""
        if not self._is_simulated:
            return 0.0
        is_long = self._random.random() < _LONG_SHARE
        return mean_s * self._random.uniform(0.5, 1.5) * (_LONG_FACTOR if is_long else 1.0)

    def work(self, mean_s: float) -> None:
        """Work for a while."""
        seconds = self.duration_s(mean_s)
        if seconds:
            time.sleep(seconds)

    def garbage(self, *shape: int) -> Words:
        """Memory that nobody has written."""
        data = self._random.randbytes(8 * int(np.prod(shape)))
        return np.frombuffer(data, np.uint64).reshape(shape).copy()

    def is_so(self, share: float) -> bool:
        """True in this share of calls."""
        return self._random.random() < share
