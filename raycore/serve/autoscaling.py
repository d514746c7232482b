"""How many replicas a deployment should have. Serve's controller unpickles this module by value, so it imports nothing
of raycore. Pure."""

from __future__ import annotations

from typing import Any, Protocol

QUEUED_TOKENS = "raycore_queued_tokens"
"""The metric that replicas report: tokens of prompts that they have taken and that have no output yet."""


class _Config(Protocol):
    def get_target_ongoing_requests(self) -> float: ...


class _Context(Protocol):
    """The part of Serve's `AutoscalingContext` that the policy reads."""

    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    aggregated_metrics: dict[str, dict[Any, float]] | None
    config: _Config


class QueuedTokensPolicy:
    """Enough replicas that each has at most so many tokens of prompts to compute, and so many requests to serve."""

    def __init__(self, target_tokens: float = 8192) -> None:
        """
        Args:
            target_tokens: of the prompts that one replica has taken and that have no output yet. A queue of this
                length takes a replica as long as it takes to compute so many tokens.

        Raises:
            ValueError: it isn't positive.
        """
        if not target_tokens > 0:
            raise ValueError(f"target_tokens={target_tokens!r} isn't a positive number")
        self._target_tokens = target_tokens

    def __call__(self, context: _Context) -> tuple[float, dict[str, Any]]:
        """The number of replicas that the load needs. Serve applies the delays, factors and bounds of its
        configuration."""
        if context.current_num_replicas == 0:
            return context.target_num_replicas, {}
        tokens = sum(((context.aggregated_metrics or {}).get(QUEUED_TOKENS) or {}).values())
        # streams whose prompts are computed keep their replicas
        requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        return max(tokens / self._target_tokens, requests), {}


def queued_tokens_policy(target_tokens: float = 8192) -> dict[str, Any]:
    """The `policy` of an `autoscaling_config` that scales by queued tokens.

    Args:
        target_tokens: see `QueuedTokensPolicy`.

    Raises:
        ValueError: it isn't positive.
    """
    QueuedTokensPolicy(target_tokens)
    return {
        "policy_function": f"{__name__}:{QueuedTokensPolicy.__name__}",
        "policy_kwargs": {"target_tokens": target_tokens},
    }
