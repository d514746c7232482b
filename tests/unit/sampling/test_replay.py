"""Outputs that are given: each token is forced, whatever the model would write."""

from __future__ import annotations

import numpy as np
import pytest
from configs import make_config

from raycore.client.thinking import ThinkingLimits
from raycore.errors import InvalidRequest
from raycore.sampling.thinking import forced_token
from raycore.sampling_params import SamplingParams


@pytest.mark.parametrize("prompt", [[7], [1, 2, 1], [5, 5, 5, 5]])
@pytest.mark.parametrize("trace", [[5], [5, 5, 5], [1, 2, 1, 2, 1], [0, 9, 0], list(range(50))])
def test_the_tokens_are_forced_one_after_the_other_and_then_nothing(tokenizer, prompt, trace):
    limit = ThinkingLimits(make_config(), tokenizer).of(SamplingParams(trace_decode_token_ids=trace))
    output: list[int] = []
    for expected in trace:
        token_id = forced_token(limit, np.array(prompt + output, np.int32), len(prompt))
        assert token_id == expected
        output.append(token_id)
    assert forced_token(limit, np.array(prompt + output, np.int32), len(prompt)) is None


def test_the_output_ends_with_the_last_of_them_and_not_before():
    params = SamplingParams(trace_decode_token_ids=[5, 6, 7], max_tokens=2, min_tokens=1)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (3, 0, True)
    assert params.snapshot() == params


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trace_decode_token_ids": []}, r"trace_decode_token_ids=\[\] has no token to replay"),
        ({"trace_decode_token_ids": [-1]}, "trace_decode_token_ids"),
        ({"trace_decode_token_ids": 5}, "trace_decode_token_ids"),
        ({"trace_decode_token_ids": [5], "n": 2}, "n=2 with trace_decode_token_ids"),
        ({"trace_decode_token_ids": [5], "stop": ["x"]}, "stop=.* with trace_decode_token_ids, which are replayed"),
        ({"trace_decode_token_ids": [5], "stop_token_ids": [5]}, "stop_token_ids=.* with trace_decode_token_ids"),
        ({"trace_decode_token_ids": [5], "thinking_token_budget": 3}, "thinking_token_budget=3 with trace_decode"),
    ],
)
def test_what_would_change_a_given_output_is_refused_by_name(given, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**given)
