"""Every sampling parameter comes from somewhere: none is dropped in silence."""

from __future__ import annotations

import msgspec
import pytest

from raycore.sampling_params import MAX_SEED, RepetitionDetectionParams, SamplingParams
from raycore.server import ServerOptions
from raycore.server.generation.sampling import COPIED, SET_OTHERWISE, chat_params, completion_params
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest

GIVEN = {
    "n": (2, 2),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (5, 5),
    "min_p": (0.5, 0.5),
    "top_n_sigma": (0.5, 0.5),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (0.5, 0.5),
    "repetition_penalty": (1.5, 1.5),
    "seed": (-2, MAX_SEED - 1),
    "stop": ("x", ["x"]),
    "stop_token_ids": ([5], [5]),
    "ignore_eos": (True, True),
    "min_tokens": (3, 3),
    "on_version_change": ("fail", "fail"),
    "prompt_logprobs": (1, 1),
    "thinking_token_budget": (9, 9),
    "repetition_detection": ({"max_pattern_size": 3, "min_count": 2}, RepetitionDetectionParams(3, 0, 2)),
    "logit_bias": ({"5": 200.0}, {5: 100.0}),
    "allowed_token_ids": ([5], [5]),
    "bad_words": (["x"], ["x"]),
    "skip_special_tokens": (False, False),
    "spaces_between_special_tokens": (False, False),
    "include_stop_str_in_output": (True, True),
}
"""A value of each field that is read from the request's field of the same name, and the parameter's."""

OPTIONS = ServerOptions(("fake",))


def completion(**fields) -> SamplingParams:
    return completion_params(CompletionRequest(prompt="1", **fields), {}, OPTIONS)


def chat(**fields) -> SamplingParams:
    body = {"messages": [{"role": "user", "content": "1"}], **fields}
    return chat_params(ChatCompletionRequest.model_validate(body), {}, OPTIONS)


def test_each_sampling_parameter_has_a_field_of_requests_or_is_set_otherwise():
    assert set(COPIED) - CompletionRequest.model_fields.keys() == set(), "fields missing in SamplingRequest"
    parameters = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert SET_OTHERWISE.keys() - parameters == set(), "these aren't parameters"


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize("name", COPIED)
def test_each_field_of_a_request_sets_its_sampling_parameter(name, read):
    value, expected = GIVEN[name]
    assert getattr(read(), name) != expected
    assert getattr(read(**{name: value}), name) == expected
    assert read(**{name: None}) == read()


@pytest.mark.parametrize("read", [completion, chat])
def test_a_seed_of_minus_one_lets_the_engine_choose_the_seed(read):
    assert read(seed=-1).seed is None
