"""Requests whose callers take each token as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulation.cluster.kinds.kind import Kind
from simulation.scenario import Request


class _Streamed(Kind):
    name = "streamed"

    def is_of(self, request: Request, options: Mapping[str, Any]) -> bool:
        return request.is_stream


KIND = _Streamed()
