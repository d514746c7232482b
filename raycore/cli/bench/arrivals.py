"""When the requests of a benchmark are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """How many requests are sent per second."""

    rate: float = math.inf
    """inf: all at once."""
    burstiness: float = 1.0
    """1: a Poisson process. Intervals have a gamma distribution: less is more bursty, more is more regular."""
    ramp_up: Literal["linear", "exponential"] | None = None
    """How the rate grows from `start_rate` to `end_rate`. None: it is `rate`."""
    start_rate: float = 0.0
    end_rate: float = 0.0

    def rate_of(self, index: int, count: int) -> float:
        """The rate at which request `index` of `count` is sent."""
        if self.ramp_up is None:
            return self.rate
        progress = index / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return self.start_rate * (self.end_rate / self.start_rate) ** progress


def arrival_times_s(traffic: Traffic, count: int, rng: np.random.Generator) -> Sequence[float]:
    """When each request is sent, in seconds from the start.

    At a constant rate, the intervals are scaled so that the last request comes after `count / rate` seconds, whatever
    the random numbers are.
    """
    intervals = [_interval_s(traffic.rate_of(index, count), traffic.burstiness, rng) for index in range(count)]
    times = np.cumsum(intervals)
    if traffic.ramp_up is None and times[-1] > 0:
        times *= count / traffic.rate / times[-1]
    return times.tolist()


def _interval_s(rate: float, burstiness: float, rng: np.random.Generator) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1 / rate
    return float(rng.gamma(burstiness, 1 / (rate * burstiness)))
