"""Adds the fields around the choices of a response, or of each event of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from raycore.server.options import ServerOptions
from raycore.server.protocol import SamplingRequest


@dataclass(frozen=True)
class Envelope:
    """The fields around the choices: the same for all events of one request."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    has_usage: bool
    """Whether a stream ends with an event that has the usage. The stream's other events then have `usage: null`."""
    has_usage_in_each: bool
    """Whether the other events have the usage so far instead of `usage: null`."""

    @staticmethod
    def of(request: SamplingRequest, model: str, request_id: str, options: ServerOptions) -> Envelope:
        """The envelope of a request, created now."""
        asked = request.stream_options
        has_usage = options.enable_force_include_usage or (asked is not None and bool(asked.include_usage))
        has_usage_in_each = options.enable_force_include_usage or (
            asked is not None and has_usage and bool(asked.continuous_usage_stats)
        )
        return Envelope(request_id, int(time.time()), model, has_usage, has_usage_in_each)

    def around(self, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        """The complete response or event. `kind` is the value of its field `object`, `used` that of `usage`."""
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
