"""Requests get prompts of what they are: queries or documents."""

from __future__ import annotations

from typing import Any

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt
from raycore.parts.pooling.client.late_texts import prompt_completion
from raycore.parts.pooling.client.pooling import resolved
from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams

TEXT = [0, 41, 42, 43, 44, 45, 2]
LATE = PoolingSpec(tasks=["token_embed"], embedding_size=8, late=LateInteraction(7, 8, 12, 7, expansion_token=9))
PLAIN = PoolingSpec(tasks=["token_embed"], embedding_size=8)


def completed(spec: PoolingSpec, kind: Any, token_ids: list[int]) -> list[int]:
    params = resolved(PoolingParams(input_type=kind), None, spec)
    (ask,) = prompt_completion(spec)([Ask(ParsedPrompt(None, token_ids), params, "a")])
    return ask.parsed.token_ids


def test_requests_get_prompts_of_what_they_are() -> None:
    for kind in ("query", "document"):
        prompt = LATE.prompt(TEXT, kind)
        assert completed(LATE, kind, TEXT) == prompt
        assert completed(LATE, kind, prompt) == prompt, "what has a marker stays"
        assert completed(LATE, None, prompt) == prompt
    assert completed(LATE, None, TEXT) == LATE.prompt(TEXT, "document")
    assert LATE.kinds == ("query", "document")


def test_prompts_of_other_models_stay() -> None:
    assert completed(PLAIN, None, TEXT) == TEXT
    assert PLAIN.kinds == (None, None)
