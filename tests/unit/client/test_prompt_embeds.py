"""Prompts of embeddings as they are given, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from configs import SPEC, make_config

from raycore.client.inputs import OnlyText, ParsedPrompt, parse_prompts
from raycore.client.prompt_embeds import PromptEmbeds
from raycore.client.tokenization import Tokenization
from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.text.tokenizer import Tokenizer

WIDTH = SPEC.hidden_size
ROWS = np.random.default_rng(0).normal(size=(150, WIDTH)).astype(np.float32)
TOKENIZER = Tokenizer.from_dir(demo_model_path())


def parse(**fields: Any) -> ParsedPrompt:
    (parsed,) = parse_prompts([fields], TOKENIZER, images=OnlyText("demo", PromptEmbeds(make_config())))
    return parsed


def values(parsed: ParsedPrompt) -> list[Any]:
    found = []
    for data in parsed.feature_data:
        if data.dtype == "bfloat16":
            upper = np.frombuffer(data.data, np.uint16).astype(np.uint32) << 16
            found.append(upper.view(np.float32).reshape(data.shape))
        else:
            found.append(np.frombuffer(data.data, data.dtype).reshape(data.shape))
    return found


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (ROWS, "float32"),
        (ROWS.astype(np.float64), "float32"),
        (ROWS.astype(np.float16), "float16"),
        (torch.tensor(ROWS, requires_grad=True), "float32"),
        (torch.tensor(ROWS).bfloat16(), "bfloat16"),
        (torch.tensor(ROWS)[None].half(), "float16"),
        (np.asfortranarray(ROWS), "float32"),
    ],
)
def test_arrays_and_tensors_become_pieces_with_their_values(given: Any, dtype: str) -> None:
    parsed = parse(prompt_embeds=given, cache_salt="salt")
    assert [(each.position, each.num_tokens) for each in parsed.features] == [(0, 128), (128, 22)]
    assert {each.dtype for each in parsed.feature_data} == {dtype}
    exact = torch.as_tensor(np.asarray(given.detach().float() if hasattr(given, "detach") else given))
    assert np.array_equal(np.concatenate(values(parsed)), exact.reshape(150, WIDTH).float().numpy())
    assert parsed.token_ids == [0] * 150
    assert parsed.cache_salt == "salt"
    assert parsed.has_unknown_tokens


def test_equal_pieces_have_equal_identifiers() -> None:
    first, second = parse(prompt_embeds=ROWS), parse(prompt_embeds=ROWS[:140])
    assert first.features[0].identifier == second.features[0].identifier
    assert first.features[1].identifier != second.features[1].identifier
    assert parse(prompt_embeds=ROWS.astype(np.float16)).features[0].identifier != first.features[0].identifier


def test_tokens_may_be_known_and_may_count_instead() -> None:
    ids = list(range(150))
    parsed = parse(prompt_embeds=ROWS, prompt_token_ids=ids, prompt="text")
    assert (parsed.token_ids, parsed.text, parsed.has_unknown_tokens) == (ids, "text", False)
    mask = [index in (0, 1, 5) or index >= 140 for index in range(150)]
    parsed = parse(prompt_embeds=ROWS, prompt_token_ids=ids, prompt_is_token_ids=mask)
    assert [(each.position, each.num_tokens) for each in parsed.features] == [(2, 3), (6, 128), (134, 6)]
    assert np.array_equal(values(parsed)[0], ROWS[2:5])
    assert not parse(prompt_embeds=ROWS, prompt_token_ids=ids, prompt_is_token_ids=[True] * 150).features


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_embeds": ROWS[:, 1:]}, r"prompt 0: the embeddings are of shape \[150, 31\]"),
        ({"prompt_embeds": ROWS[0]}, r"shape \[32\]"),
        ({"prompt_embeds": ROWS[:0]}, r"shape \[0, 32\]"),
        ({"prompt_embeds": np.stack([ROWS, ROWS])}, r"shape \[2, 150, 32\]"),
        ({"prompt_embeds": np.concatenate([ROWS, ROWS])}, "300 embeddings, more than max_model_len=256"),
        ({"prompt_embeds": ROWS.astype(np.int32)}, "values of int32, not floats"),
        ({"prompt_embeds": torch.zeros(2, WIDTH, dtype=torch.long)}, "values of int64, not floats"),
        ({"prompt_embeds": ROWS.tolist()}, "the embeddings are list, not a tensor"),
        ({"prompt_embeds": np.full((2, WIDTH), np.inf, np.float32)}, "aren't finite"),
        ({"prompt_embeds": ROWS, "prompt_token_ids": [1]}, "1 prompt_token_ids for 150 embeddings"),
        ({"prompt_embeds": ROWS, "prompt_is_token_ids": [True] * 150}, "prompt_is_token_ids isn't"),
        (
            {"prompt_embeds": ROWS, "prompt_token_ids": [1] * 150, "prompt_is_token_ids": [1] * 150},
            "prompt_is_token_ids isn't",
        ),
        ({"prompt_embeds": ROWS, "multi_modal_data": {"image": 1}}, "both 'prompt_embeds' and 'multi_modal_data'"),
    ],
)
def test_what_cannot_be_used_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(**fields)


def test_embeddings_are_not_cut() -> None:
    embeds = OnlyText("demo", PromptEmbeds(make_config()))
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        parse_prompts([{"prompt_embeds": ROWS}], TOKENIZER, Tokenization(max_tokens=5), embeds)


def test_engines_that_have_not_been_asked_to_take_embeddings_refuse_them() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt 0 has prompt_embeds, which need .* enable_prompt_embeds=True"):
        parse_prompts([{"prompt_embeds": ROWS}], TOKENIZER)
