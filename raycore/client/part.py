"""The contract between a client and what adds to the outputs of requests, from what ranks report.

A capability's part in workers, or in the scheduler, adds `TokenReport`s to a step's result, under its name. They travel
with the tokens to the client, where its `OutputPart` takes them.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from raycore.messages import TokenReport
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams


class OutputAddition(Protocol):
    """What a part adds to the outputs of one request."""

    def take(self, index: int, report: TokenReport) -> None:
        """Take what a rank reports of tokens of the request's sequence `index`, before any output with these tokens.

        A sequence's tokens come in order, and again from an earlier one on if they are computed again: after a
        preemption, or on another rank. The last ones may not be of the output, if it has ended before. A report without
        tokens is of the sequence's end, and comes with it.
        """
        ...

    def add_to(self, output: RequestOutput) -> None:
        """Set fields of the request's output so far, or of the outputs of its sequences."""
        ...


class OutputPart(Protocol):
    """What a capability adds to outputs."""

    name: ClassVar[str]
    """As in the reports. Each report of a request is of a part that it asks for."""

    def is_asked(self, params: SamplingParams) -> bool:
        """Whether a new request gets what the part adds."""
        ...

    def begin(self, params: SamplingParams) -> OutputAddition:
        """Return what a new request gets that asks for it."""
        ...
