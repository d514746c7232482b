"""The fields around the choices of a response and of each event of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from raycore.server.protocol import SamplingRequest


@dataclass(frozen=True)
class Envelope:
    """The envelope of one request's responses."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    has_usage: bool
    """Whether a stream ends with an event that holds the usage. Its other events then have `usage: null`."""
    has_usage_in_each: bool
    """Whether the other events have the usage so far instead of null."""

    @staticmethod
    def of(request: SamplingRequest, model: str, request_id: str) -> Envelope:
        """The envelope of a request that starts now."""
        options = request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        has_usage_in_each = options is not None and has_usage and bool(options.continuous_usage_stats)
        return Envelope(request_id, int(time.time()), model, has_usage, has_usage_in_each)

    def around(self, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        """The complete object. `kind` is its `object` field."""
        envelope: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if used is not None or self.has_usage:
            envelope["usage"] = used
        return envelope
