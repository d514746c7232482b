"""Outputs that are given: each token is forced, whatever the model would write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from configs import make_config
from small_model import make_sampling

from raycore.errors import InvalidRequest
from raycore.messages import EngineRequest
from raycore.parts.constraints.client import ThinkingLimits
from raycore.parts.constraints.scheduler import Constraints
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams
from raycore.scheduler.request import RequestLimits


class Lengths:
    """A batch whose sequences' lengths are known, and not their tokens."""

    num_prompt = np.array([3, 3])


def sampled(trace: list[int], position: int) -> int:
    sampler = Sampler(60, make_sampling("torch"))
    sampler.add(0, SamplingParams(trace_decode_token_ids=trace), 0)
    sampler.add(1, SamplingParams(temperature=0.0), 0)
    logits = torch.zeros(2, 60)
    logits[:, 59] = 100.0
    tokens = sampler.sample(logits, np.array([0, 1]), np.array([position] * 2), Lengths()).token_ids_R
    assert tokens[1] == 59
    return int(tokens[0])


@pytest.mark.parametrize("trace", [[5], [5, 5, 5], [1, 2, 1, 2, 1], [0, 9, 0], list(range(50))])
def test_the_tokens_are_forced_one_after_the_other_and_then_nothing_without_those_before(trace):
    assert [sampled(trace, 3 + index) for index in range(len(trace) + 1)] == [*trace, 59]


def test_a_replay_does_not_wait_for_its_last_token(tokenizer):
    params = SamplingParams(trace_decode_token_ids=[5, 6])
    limit = ThinkingLimits(make_config(), tokenizer).of(params)
    message = EngineRequest(1, "r1", [1], params, 0, thinking=limit)
    assert not Constraints().needs_output(RequestLimits(100, 32, 4, 100).admit(message, arrival=0))


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
