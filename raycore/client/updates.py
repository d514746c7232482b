"""The updates that a client delivers to callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from raycore.outputs import RequestOutput

Streaming: TypeAlias = bool | Literal["text"]
"""Which outputs of a request a caller wants. True: one whenever there are new tokens. `text`: the first one, those with
new text, and the last one. False: the last one."""

COALESCE_S = 0.1
"""How long, in seconds, a rank may hold back tokens of requests that don't stream, to send more at once."""

STOP_STRING_COALESCE_S = 0.01
"""Replaces `COALESCE_S` for requests with stop strings. Shorter, because tokens computed after a stop string are
wasted."""


@dataclass(slots=True)
class Update:
    """An output of one request, or the error that ended it."""

    request_id: str
    output: RequestOutput | None = None
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.output is None or self.output.finished


Sink = Callable[[list[Update]], object]
"""Receives a batch of updates on one of the client's threads. Must not block.

An older output may come after a request's last update: the thread that aborts or fails a request delivers that update
while a receiver thread may be about to deliver an output. A sink has to ignore outputs that come after the last update.
"""
