"""What an answer and each event of it have around their choices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from raycore.server.protocol import SamplingRequest


@dataclass(frozen=True)
class Envelope:
    """That of one request."""

    id: str
    created: int
    """In seconds since 1970."""
    model: str
    has_usage: bool
    """Whether a stream ends with its usage; the other objects then have the field, too, but null."""
    has_usage_in_each: bool
    """Whether the other objects have the usage so far instead of null."""

    @staticmethod
    def of(request: SamplingRequest, model: str, request_id: str) -> Envelope:
        """For a request that begins now."""
        options = request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        has_usage_in_each = options is not None and has_usage and bool(options.continuous_usage_stats)
        return Envelope(request_id, int(time.time()), model, has_usage, has_usage_in_each)

    def around(self, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        """The whole object, as OpenAI's `kind` of object."""
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
