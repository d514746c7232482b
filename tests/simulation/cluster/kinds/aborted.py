"""Requests whose callers leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulation.cluster.kinds.kind import Kind
from simulation.scenario import Request


class _Aborted(Kind):
    name = "aborted"

    def is_of(self, request: Request, options: Mapping[str, Any]) -> bool:
        return request.abort_after_s is not None


KIND = _Aborted()
