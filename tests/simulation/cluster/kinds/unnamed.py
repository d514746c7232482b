"""Requests whose callers give them no id. Nobody else can name them, so no operator aborts one alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.kinds.kind import Kind
from simulation.scenario import Request


class _Unnamed(Kind):
    name = "unnamed"
    engine_share = 0.1
    request_share = 0.18  # small: what requests are of other kinds is drawn before
    excludes = (
        "added", "ended between pieces", "ended by operators", "odd values", "pieces", "pooled", "refused",
        "slow pieces",
    )  # fmt: skip

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> bool:
        return True


KIND = _Unnamed()
