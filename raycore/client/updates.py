"""What a client tells those who wait for requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams

COALESCE_S = 0.1
"""How long tokens that nobody looks at before the request ends may wait for company."""

STOP_STRING_COALESCE_S = 0.01
"""The same when a stop string may end the request: every token past it is wasted work."""


@dataclass(slots=True)
class Update:
    """News of one request: an output, or the error that ended it."""

    request_id: str
    output: RequestOutput | None = None
    error: BaseException | None = None


Sink = Callable[[list[Update]], object]
"""Gets a batch of updates, on one of the client's threads; must not block."""


def coalescing_s(params: Sequence[SamplingParams]) -> float:
    """How long tokens of requests that don't stream may wait."""
    return STOP_STRING_COALESCE_S if any(each.stop_strings for each in params) else COALESCE_S
