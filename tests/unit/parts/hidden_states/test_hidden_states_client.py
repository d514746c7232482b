"""Outputs have the hidden states that their requests ask for, in the form of a matrix."""

from __future__ import annotations

import numpy as np
import pytest

from raycore.messages import TokenReport
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.hidden_states.client import HiddenStates
from raycore.sampling_params import SamplingParams

PROMPT = [7, 8, 9]


def report(first: int, *numbers: float) -> TokenReport:
    states = np.repeat(np.array(numbers, np.float32), 2)
    return TokenReport("hidden_states", first, len(numbers), states.tobytes())


def output(num_tokens: int = 0, n: int = 1) -> RequestOutput:
    outputs = [CompletionOutput(index, "", list(range(num_tokens))) for index in range(n)]
    return RequestOutput("r", None, PROMPT, None, outputs, False)


@pytest.mark.parametrize(
    ("asked", "of_prompt", "of_output"),
    [
        ({"return_hidden_states": True}, None, [[2, 2], [3, 3]]),
        ({"return_prompt_hidden_states": True}, [[0, 0], [1, 1], [2, 2]], None),
        (
            {"return_hidden_states": True, "return_prompt_hidden_states": True},
            [[0, 0], [1, 1], [2, 2]],
            [[2, 2], [3, 3]],
        ),
    ],
)
def test_a_request_gets_what_it_asks_for(asked, of_prompt, of_output):
    states = HiddenStates().begin(SamplingParams(**asked))
    states.take(0, report(0, 0, 1, 2))
    states.take(0, report(3, 3))
    states.add_to(out := output(num_tokens=2))
    found = (out.prompt_hidden_states, out.outputs[0].hidden_states)
    assert [None if each is None else each.tolist() for each in found] == [of_prompt, of_output]


def test_those_of_the_prompt_come_when_there_are_all():
    states = HiddenStates().begin(SamplingParams(return_prompt_hidden_states=True, return_hidden_states=True))
    states.take(0, report(0, 0, 1))
    states.add_to(out := output())
    assert out.prompt_hidden_states is None
    assert out.outputs[0].hidden_states.shape == (0, 0)


def test_requests_that_ask_for_none_have_none():
    part = HiddenStates()
    assert not part.is_asked(SamplingParams())
    assert part.is_asked(SamplingParams(return_hidden_states=True))
    assert part.is_asked(SamplingParams(return_prompt_hidden_states=True))
