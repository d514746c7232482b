"""Whether a prefix takes less time to fetch than to compute. Knows what both have taken before, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raycore.system import time

_WEIGHT = 0.25
"""The weight of a new measurement, beside all earlier ones."""
_FORGET_S = 60.0
"""A rate that is so old may be wrong: fetching is tried again, whatever it took then."""
_LOCAL_BYTES_PER_S = 1e9
_NETWORK_BYTES_PER_S = 2e8
"""What fetches are expected to bring in a second before any has been measured, cautiously: through shared memory, and
over a network."""
_SETUP_S = 2e-3
"""What a fetch takes besides its bytes."""
_MIN_STEP_TOKENS = 32
"""Steps of fewer tokens say nothing of how fast prompts are computed."""


@dataclass(slots=True)
class _Rate:
    """Something per second, as measured."""

    value: float
    measured_s: float = float("-inf")

    def observe(self, value: float, now_s: float) -> None:
        is_first = self.measured_s == float("-inf")
        self.value = value if is_first else (1 - _WEIGHT) * self.value + _WEIGHT * value
        self.measured_s = now_s


class CostModel:
    """The rates of one rank: bytes that it fetches, and tokens of prompts that it computes."""

    def __init__(self, block_bytes: int, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            block_bytes: bytes of a block on one worker. All workers fetch at the same time.
            block_size: tokens of a block.
            clock: gives the time in seconds.
        """
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._clock = clock
        self._fetched = {True: _Rate(_LOCAL_BYTES_PER_S), False: _Rate(_NETWORK_BYTES_PER_S)}
        """By whether it goes through shared memory: bytes a second."""
        self._computed = _Rate(0.0)
        """Tokens a second, as soon as it is known."""

    def observe_fetch(self, num_bytes: int, took_s: float, *, is_local: bool) -> None:
        """Note what a worker has fetched, and how long that took. One that failed early took its whole time."""
        if num_bytes > 0:
            self._fetched[is_local].observe(num_bytes / max(took_s - _SETUP_S, 1e-6), self._clock())

    def observe_failure(self, *, is_local: bool) -> None:
        """Note that a fetch brought nothing: the next one must be worth more."""
        rate = self._fetched[is_local]
        rate.observe(rate.value / 4, self._clock())

    def observe_step(self, num_tokens: int, duration_s: float) -> None:
        """Note what a step has computed, and how long that took."""
        if num_tokens >= _MIN_STEP_TOKENS and duration_s > 0:
            self._computed.observe(num_tokens / duration_s, self._clock())

    def fetch_s(self, num_blocks: int, *, is_local: bool) -> float:
        """How long a fetch is expected to take, in seconds."""
        rate = self._fetched[is_local]
        value = rate.value
        if self._clock() - rate.measured_s > _FORGET_S:
            value = max(value, _LOCAL_BYTES_PER_S if is_local else _NETWORK_BYTES_PER_S)
        return _SETUP_S + num_blocks * self._block_bytes / value

    def compute_s(self, num_blocks: int) -> float:
        """How long computing the blocks' tokens is expected to take, in seconds. Infinite before any step has."""
        rate = self._computed.value
        return num_blocks * self._block_size / rate if rate > 0 else float("inf")

    def is_worth_fetching(self, num_blocks: int, *, is_local: bool, num_read: int | None = None) -> bool:
        """Whether fetching is expected to take less time than computing.

        `num_read`: how many blocks of all groups of layers are fetched for these. None: as many.
        """
        num_read = num_blocks if num_read is None else num_read
        return num_blocks > 0 and self.fetch_s(num_read, is_local=is_local) < self.compute_s(num_blocks)
