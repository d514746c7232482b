"""`use_beam_search` of completions and chats."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.beam_search import BeamSearchParams

TEXT = " 85 is the answer"


def test_a_completion_has_a_choice_for_each_beam(client: Any, engine: Any) -> None:
    fields = {"n": 3, "max_tokens": 100, "logprobs": 2, "top_p": 0.5, "seed": 1, "temperature": 0}
    answer = client.complete(use_beam_search=True, length_penalty=0.5, ignore_eos=True, cache_salt="s", **fields).json
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(index, TEXT) for index in range(3)]
    assert [each["finish_reason"] for each in answer["choices"]] == ["stop"] * 3
    assert [each["logprobs"]["token_logprobs"][0] for each in answer["choices"]] == [-1, -2, -3]
    assert engine.beams == [BeamSearchParams(3, 100, ignore_eos=True, length_penalty=0.5)]
    assert engine.cache_salts == ["s"]
    assert engine.params == []
    num_tokens = len(engine.get_tokenizer().encode(TEXT))
    assert answer["usage"]["completion_tokens"] == 3 * num_tokens


def test_a_chat_has_a_choice_for_each_beam(client: Any, engine: Any) -> None:
    answer = client.chat(use_beam_search=True, n=2, include_stop_str_in_output=True, skip_special_tokens=False).json
    assert [each["message"]["content"] for each in answer["choices"]] == [TEXT] * 2
    assert [each["logprobs"] for each in answer["choices"]] == [None, None]
    (params,) = engine.beams
    assert params.beam_width == 2
    assert params.max_tokens == engine.max_model_len
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


@pytest.mark.parametrize("ask", ["complete", "chat"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"n": 1000}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_beam_search_cannot_follow_is_refused(
    client: Any, engine: Any, ask: str, fields: dict[str, Any], param: str
) -> None:
    answer = getattr(client, ask)(use_beam_search=True, **fields)
    assert answer.error == (400, "invalid_request_error", param)
    assert engine.beams == engine.params == []


def test_neutral_values_are_no_obstacle(client: Any, engine: Any) -> None:
    neutral = {"stop": [], "stop_token_ids": [], "min_tokens": 0, "logit_bias": {}, "frequency_penalty": 0.0}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0, "structured_outputs": None, "best_of": 2, "n": 2}
    assert client.complete(use_beam_search=True, **neutral).status == 200
    neutral |= {"response_format": {"type": "text"}}
    assert client.chat(use_beam_search=True, **neutral).status == 200
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    answer = client.chat(use_beam_search=True, tools=[tool], tool_choice="required")
    assert answer.error == (400, "invalid_request_error", "tools")
    assert len(engine.beams) == 2
