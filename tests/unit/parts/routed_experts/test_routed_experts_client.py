"""Outputs have the experts of all tokens but the last, in all layers, when a sequence ends."""

from __future__ import annotations

import numpy as np
import pytest
from configs import SPEC
from msgspec.structs import replace

from raycore.messages import TokenReport
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.experts.models import MoeSpec
from raycore.parts.routed_experts.client import ReturnedExperts
from raycore.sampling_params import SamplingParams

MOE = replace(SPEC, num_layers=3, moe=MoeSpec(9, 2, 8, [False, True, True]))
PROMPT = [7, 8, 9]


def report(first: int, end: int) -> TokenReport:
    rows = [bytes([position, position + 1, 5, 6]) for position in range(first, end)]
    return TokenReport("routed_experts", first, end - first, b"".join(rows))


def output(num_tokens: int, finish_reason: str | None) -> RequestOutput:
    completion = CompletionOutput(0, "", list(range(num_tokens)), finish_reason=finish_reason)
    return RequestOutput("r", None, PROMPT, None, [completion], finish_reason is not None)


def test_they_come_with_the_end_of_a_sequence() -> None:
    part = ReturnedExperts(MOE)
    assert part.is_asked(SamplingParams())
    experts = part.begin(SamplingParams())
    experts.take(0, report(0, 3))
    experts.add_to(out := output(1, None))
    assert out.outputs[0].routed_experts is None
    experts.take(0, report(3, 4))
    experts.add_to(out := output(2, "length"))
    ids = out.outputs[0].routed_experts
    assert ids is not None
    assert (ids.shape, ids.dtype) == ((4, 3, 2), np.uint8)
    assert not ids[:, 0].any(), "the layer has no experts"
    assert ids[:, 1:].tolist() == [[[position, position + 1], [5, 6]] for position in range(4)]


@pytest.mark.parametrize("num_known", [0, 2, 3])
def test_an_aborted_sequence_has_those_that_have_come(num_known: int) -> None:
    experts = ReturnedExperts(MOE).begin(SamplingParams())
    experts.take(0, report(0, num_known))
    experts.add_to(out := output(1 if num_known == 3 else 0, "abort"))
    ids = out.outputs[0].routed_experts
    assert ids is not None
    assert len(ids) == num_known
