"""Requests that share cached prefixes only with those of the same salt."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.kinds.kind import Asked, Kind
from simulation.scenario import Request


class _CacheSalt(Kind):
    name = "cache salt"
    engine_share = 0.2
    excludes = ("pooled",)  # whose parameters can't tell the simulated workers

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return draw.choice(["a", "b"])

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        asked.prompt["cache_salt"] = asked.engine["cache_salt"] = value
        asked.params["extra_args"] = {"salt": value}  # so that workers see what mustn't be shared


KIND = _CacheSalt()
