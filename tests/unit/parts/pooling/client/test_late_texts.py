"""Requests get prompts of what they are: queries or documents."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt
from raycore.errors import InvalidRequest
from raycore.parts.pooling.client.late_texts import prompt_completion
from raycore.parts.pooling.client.pooling import resolved
from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams

TEXT = [0, 41, 42, 43, 44, 45, 2]
LATE = PoolingSpec(tasks=["token_embed"], embedding_size=8, late=LateInteraction(7, 8, 12, 7, expansion_token=9))
PLAIN = PoolingSpec(tasks=["token_embed"], embedding_size=8)


def completed(spec: PoolingSpec, kind: Any, token_ids: list[int], max_length: int = 64) -> list[int]:
    params = resolved(PoolingParams(input_type=kind), None, spec)
    (ask,) = prompt_completion(spec)([Ask(ParsedPrompt(None, token_ids), params, "a")], max_length)
    return ask.parsed.token_ids


def test_requests_get_prompts_of_what_they_are() -> None:
    for kind in ("query", "document"):
        prompt = LATE.prompt(TEXT, kind)
        assert completed(LATE, kind, TEXT) == prompt
        assert completed(LATE, kind, prompt) == prompt, "what has a marker stays"
        assert completed(LATE, None, prompt) == prompt
    assert completed(LATE, None, TEXT) == LATE.prompt(TEXT, "document")
    assert completed(LATE, None, TEXT, max_length=6) == LATE.prompt(TEXT, "document")[:5] + TEXT[-1:]
    assert LATE.kinds == ("query", "document")


@pytest.mark.parametrize(
    ("prompt", "fragment"),
    [
        (ParsedPrompt(None, [41]), "only the token 41"),
        (ParsedPrompt(None, TEXT, second_text=3), "token_type_ids has two texts"),
    ],
)
def test_prompts_that_have_no_place_for_a_marker_are_refused(prompt: ParsedPrompt, fragment: str) -> None:
    ask = Ask(prompt, PoolingParams(), "a")
    with pytest.raises(InvalidRequest, match=fragment):
        prompt_completion(LATE)([ask], 64)
    assert prompt_completion(PLAIN)([ask], 64) == [ask]


def test_a_text_gets_a_marker_whatever_it_begins_with() -> None:
    begins_with_a_marker = [0, 7, 41, 2]
    ask = Ask(ParsedPrompt("[Q] a", begins_with_a_marker, is_tokenized=True), PoolingParams(), "a")
    (found,) = once = prompt_completion(LATE)([ask], 64)
    assert found.parsed.token_ids == [0, 8, 7, 41, 2]
    assert prompt_completion(LATE)(once, 64) == once, "token ids that have a marker stay"


def test_prompts_of_other_models_stay() -> None:
    assert completed(PLAIN, None, TEXT) == TEXT
    assert PLAIN.kinds == (None, None)
