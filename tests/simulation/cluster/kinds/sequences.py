"""Requests for several sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulation.cluster.kinds.kind import Kind
from simulation.scenario import Request


class _Sequences(Kind):
    name = "n"

    def is_of(self, request: Request, options: Mapping[str, Any]) -> bool:
        return request.n > 1


KIND = _Sequences()
