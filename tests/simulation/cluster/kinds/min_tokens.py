"""Requests that can't end before they have some tokens."""

from __future__ import annotations

from simulation.cluster.kinds.rules import Rule, many_tokens

KIND = Rule(
    "min tokens",
    lambda draw, request: {
        "min_tokens": draw.randint(1, request.max_tokens),
        "stop_token_ids": many_tokens(draw),
    },
)
