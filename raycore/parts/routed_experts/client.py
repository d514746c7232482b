"""Adds the experts of tokens to the outputs of requests."""

from __future__ import annotations

from typing import ClassVar

from raycore.messages import TokenReport
from raycore.models.spec import ModelSpec
from raycore.outputs import RequestOutput
from raycore.parts.routed_experts.models import NAME, ExpertRows
from raycore.sampling_params import SamplingParams


class ReturnedExperts:
    """Implements `OutputPart`."""

    name: ClassVar[str] = NAME

    def __init__(self, spec: ModelSpec) -> None:
        self._rows = ExpertRows.of(spec)

    def is_asked(self, params: SamplingParams) -> bool:
        """Every request gets them."""
        return True

    def begin(self, params: SamplingParams) -> ExpertsOfRequest:
        """Return what keeps the experts of a new request's tokens."""
        return ExpertsOfRequest(self._rows, params.n)


class ExpertsOfRequest:
    """The experts of one request's tokens. Implements `OutputAddition`."""

    def __init__(self, rows: ExpertRows, n: int) -> None:
        """`n`: the number of sequences."""
        self._rows = rows
        self._known = [bytearray() for _ in range(n)]
        """Of each sequence: the rows of its tokens so far."""

    def take(self, index: int, report: TokenReport) -> None:
        """Append rows. Those of tokens that were computed before stay: their experts led to the tokens that follow."""
        known = self._known[index]
        num_again = len(known) - report.position * self._rows.num_bytes
        assert num_again >= 0, "positions come without gaps"
        known += report.data[num_again:]

    def add_to(self, output: RequestOutput) -> None:
        """Set the experts of sequences that have ended: of all tokens but the last one, which no step has computed."""
        for each in output.outputs:
            if each.finish_reason is not None:
                num_computed = len(output.prompt_token_ids) + len(each.token_ids) - 1
                rows = self._known[each.index][: num_computed * self._rows.num_bytes]
                each.routed_experts = self._rows.by_layer(rows)
