"""Every sampling parameter comes from somewhere: none is dropped in silence."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import to_builtins
from sampling_values import CHANGING_DRAWS, CHANGING_OUTPUTS

from raycore.sampling_params import MAX_SEED, SamplingParams
from raycore.server import ServerOptions
from raycore.server.copied_parameters import COPIED, SET_OTHERWISE
from raycore.server.dialects.responses.chat_request import chat_request
from raycore.server.dialects.responses.protocol import ResponsesRequest
from raycore.server.generation.sampling import chat_params, completion_params
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest

VALUES = CHANGING_DRAWS | CHANGING_OUTPUTS
GIVEN = {name: (to_builtins(value, str_keys=True), value) for name, value in VALUES.items()}
"""A value of each field that is read from the request's field of the same name, and the parameter's."""
GIVEN |= {"seed": (-2, MAX_SEED - 1), "stop": ("x", ["x"]), "logit_bias": ({"5": 200.0}, {5: 100.0})}

OPTIONS = ServerOptions(("fake",))


def completion(**fields) -> SamplingParams:
    return completion_params(CompletionRequest(prompt="1", **fields), {}, OPTIONS)


def chat(**fields) -> SamplingParams:
    body = {"messages": [{"role": "user", "content": "1"}], **fields}
    return chat_params(ChatCompletionRequest.model_validate(body), {}, OPTIONS)


def response(**fields) -> SamplingParams:
    body = ResponsesRequest.model_validate({"input": "1", **fields})
    return chat_params(chat_request(body, [{"role": "user", "content": "1"}], continues=False), {}, OPTIONS)


def test_only_sampling_parameters_are_set_otherwise():
    parameters = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert SET_OTHERWISE.keys() - parameters == set(), "these aren't parameters"


@pytest.mark.parametrize(
    ("read", "name"),
    [
        *((read, name) for read in (completion, chat) for name in COPIED),
        *((response, name) for name in COPIED if name not in ("n", "prompt_logprobs")),
    ],
)
def test_each_field_of_a_request_sets_its_sampling_parameter(read, name):
    value, expected = GIVEN[name]
    assert getattr(read(), name) != expected
    assert getattr(read(**{name: value}), name) == expected
    assert read(**{name: None}) == read()


@pytest.mark.parametrize("read", [completion, chat, response])
def test_a_seed_of_minus_one_lets_the_engine_choose_the_seed(read):
    assert read(seed=-1).seed is None
