"""What Ray Serve does around the policy of autoscaling: averages, factors, bounds and delays, in virtual time.

A replica of the deployment is a rank here. The policy is the product's: `raycore.serve.autoscaling`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import msgspec

from raycore.errors import InvalidConfig
from raycore.options.declared import settings_of
from raycore.serve.autoscaling import QUEUED_TOKENS, QueuedTokensPolicy

TICK_S = 1.0
"""How often the number of replicas is decided. Serve does it more often, which its delays hide."""


class AutoscalingOptions(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of Serve's `autoscaling_config`, with its defaults, and `target_tokens` of raycore's policy."""

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    target_ongoing_requests: float | None = None
    """None: `max_num_seqs`, as raycore's application sets it."""
    target_tokens: float = 8192
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    look_back_period_s: float = 30.0
    metrics_interval_s: float = 10.0


def autoscaling_options(given: dict[str, Any]) -> AutoscalingOptions:
    """Check the options.

    Raises:
        InvalidConfig: one is unknown or invalid. The message names it.
    """
    options: AutoscalingOptions = settings_of("--autoscaling", given, AutoscalingOptions)
    if not 1 <= options.min_replicas <= options.max_replicas:
        raise InvalidConfig(
            f"--autoscaling: min_replicas={options.min_replicas} and max_replicas={options.max_replicas}: expected "
            "1 <= min_replicas <= max_replicas"
        )
    initial = options.initial_replicas
    if initial is not None and not options.min_replicas <= initial <= options.max_replicas:
        raise InvalidConfig(f"--autoscaling: initial_replicas={initial} isn't from min_replicas to max_replicas")
    for name in ("target_ongoing_requests", "target_tokens", "upscaling_factor", "downscaling_factor"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InvalidConfig(f"--autoscaling: {name}={value!r} isn't a positive number")
    return options


class _Context(msgspec.Struct):
    """What the policy reads."""

    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    aggregated_metrics: dict[str, dict[Any, float]] | None
    config: Any


class _Config(msgspec.Struct):
    target: float

    def get_target_ongoing_requests(self) -> float:
        return self.target


class Autoscaling:
    """Decides how many replicas there are."""

    def __init__(self, options: AutoscalingOptions, max_num_seqs: int) -> None:
        self._options = options
        self._policy = QueuedTokensPolicy(options.target_tokens)
        self._config = _Config(options.target_ongoing_requests or float(max_num_seqs))
        self._reports: deque[tuple[float, int, int]] = deque()
        """(time, requests, queued tokens) within the last period."""
        self._wants_since_s: tuple[int, float] | None = None
        """The direction in which the number is to change, and since when."""

    @property
    def num_at_first(self) -> int:
        """Number of replicas at the start."""
        return self._options.initial_replicas or self._options.min_replicas

    def report(self, now_s: float, num_requests: int, num_queued_tokens: int) -> None:
        """Note what the replicas report, all together."""
        if not self._reports or now_s - self._reports[-1][0] >= self._options.metrics_interval_s:
            self._reports.append((now_s, num_requests, num_queued_tokens))
        while now_s - self._reports[0][0] > self._options.look_back_period_s:
            self._reports.popleft()

    def decide(self, now_s: float, num_serving: int, target: int) -> int:
        """Return how many replicas there are to be.

        Args:
            num_serving: how many serve now.
            target: what was decided last.
        """
        count = len(self._reports) or 1
        requests = sum(each[1] for each in self._reports) / count
        tokens = sum(each[2] for each in self._reports) / count
        metrics: dict[str, dict[Any, float]] = {QUEUED_TOKENS: {"all": tokens}}
        wanted, _ = self._policy(_Context(num_serving, target, requests, metrics, self._config))
        wanted = self._scaled(wanted, num_serving)
        wanted = min(max(wanted, self._options.min_replicas), self._options.max_replicas)
        return self._delayed(wanted, target, now_s)

    def _scaled(self, wanted: float, current: int) -> int:
        """Apply the factors to the change."""
        change = wanted - current
        factor = self._options.upscaling_factor if change > 0 else self._options.downscaling_factor
        scaled = math.ceil(current + factor * change)
        return scaled - 1 if math.ceil(wanted) < current == scaled else scaled

    def _delayed(self, wanted: int, target: int, now_s: float) -> int:
        """Change the target once it was to change in the same direction for long enough."""
        direction = (wanted > target) - (wanted < target)
        if not direction:
            self._wants_since_s = None
            return target
        if self._wants_since_s is None or self._wants_since_s[0] != direction:
            self._wants_since_s = (direction, now_s)
        delay_s = self._options.upscale_delay_s if direction > 0 else self._options.downscale_delay_s
        if now_s - self._wants_since_s[1] + 1e-6 < delay_s:
            return target
        self._wants_since_s = None
        return wanted
