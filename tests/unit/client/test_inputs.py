"""What is taken as a prompt, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.client.inputs import parse_prompts, priorities_for_each
from raycore.errors import InvalidRequest


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "1", "cache_salt": "s"},
        {"prompt_token_ids": [5], "cache_salt": "s"},
        {"prompt": "1", "prompt_token_ids": [5], "cache_salt": "s"},
        {"prompt": "1", "cache_salt": "s", "multi_modal_data": None, "mm_processor_kwargs": {}},
    ],
)
def test_a_prompt_mapping_may_have_a_cache_salt_and_empty_multi_modal_keys(tokenizer, prompt: dict[str, Any]):
    (parsed,) = parse_prompts([prompt], tokenizer)
    assert parsed.cache_salt == "s"
    assert parsed.token_ids


def test_a_prompt_says_whether_its_tokens_were_given(tokenizer):
    ids = tokenizer.encode("a fox")
    given = ["a fox", ids, {"prompt": "a fox"}, {"prompt": "a fox", "prompt_token_ids": ids}]
    parsed = parse_prompts(given, tokenizer)
    assert [each.token_ids for each in parsed] == [ids] * 4
    assert [each.is_tokenized for each in parsed] == [True, False, True, False]


def test_a_prompt_without_a_cache_salt_has_none(tokenizer):
    assert [each.cache_salt for each in parse_prompts(["1", [5], {"prompt": "1", "cache_salt": None}], tokenizer)] == [
        None
    ] * 3


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ({"prompt": "1", "multi_modal_data": {"image": "x"}}, "has images, but this model takes only texts"),
        ({"prompt": "1", "mm_processor_kwargs": {"a": 1}}, "'mm_processor_kwargs'"),
        ({"prompt": "1", "nonsense": 1}, "'nonsense'"),
        ({"prompt": "1", "nonsense": None}, "'nonsense'"),
        ({"prompt_token_ids": [5], "prompt_tokens": [5]}, "'prompt_tokens'"),
        ({"prompt_embeds": [0.5]}, "enable_prompt_embeds=True"),
        ({"encoder_prompt": "1", "decoder_prompt": None}, "'encoder_prompt', for models that encode one text"),
        ({"prompt": "1", 5: 6}, "5"),
        ({"prompt": "1", "cache_salt": ""}, "cache_salt=''"),
        ({"prompt": "1", "cache_salt": 5}, "cache_salt=5"),
        ({"prompt": "1", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": 5, "prompt_token_ids": [5]}, "prompt 1"),
        ({}, "without 'prompt', 'prompt_token_ids' or 'prompt_embeds'"),
        ({"prompt": None, "prompt_token_ids": None}, "without 'prompt', 'prompt_token_ids' or 'prompt_embeds'"),
    ],
)
def test_an_unknown_key_of_a_prompt_is_refused_by_its_name(tokenizer, prompt: dict[Any, Any], named: str):
    with pytest.raises(InvalidRequest, match="prompt 1") as error:
        parse_prompts(["1", prompt], tokenizer)
    assert named in str(error.value)


@pytest.mark.parametrize("prompt", ["a\ud83d", {"prompt": "a\ud83d"}, {"prompt": "a\ud83d", "prompt_token_ids": [5]}])
def test_a_prompt_with_half_of_a_surrogate_pair_is_refused(tokenizer, prompt: Any):
    with pytest.raises(InvalidRequest, match=r"prompt 0 contains '\\ud83d' at character 1"):
        parse_prompts([prompt], tokenizer)


def test_priorities_are_taken_as_a_list_with_one_for_each_prompt():
    assert priorities_for_each(None, 2) == [0, 0]
    assert priorities_for_each([1, -(2**63)], 2) == [1, -(2**63)]
    assert priorities_for_each((3,), 1) == [3]
    assert priorities_for_each(3, 2) == [3, 3]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (1.5, "priority=1.5 isn't a list"),
        ("11", "priority='11' isn't a list"),
        ([1], "1 priorities for 2 prompts"),
        ([1, "2"], "priority='2' isn't an integer"),
        ([1, True], "priority=True isn't an integer"),
        ([1, 1.5], "priority=1.5 isn't an integer"),
        ([1, 2**63], f"priority={2**63} isn't in"),
    ],
)
def test_invalid_priorities_are_refused_by_their_value(given: Any, named: str):
    with pytest.raises(InvalidRequest) as error:
        priorities_for_each(given, 2)
    assert named in str(error.value)
