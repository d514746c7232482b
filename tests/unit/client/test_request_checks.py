"""A request is checked as the one that ranks get of it."""

from __future__ import annotations

import msgspec
import pytest
from configs import SPEC, make_config

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt
from raycore.client.request_checks import RequestChecks
from raycore.errors import RequestTooLarge
from raycore.messages import EngineInfo
from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.text.no_tokenizer import NoTokenizer

LATE = PoolingSpec(tasks=["token_embed"], embedding_size=8, late=LateInteraction(7, 8, 12, 9))


@pytest.fixture
def checks() -> RequestChecks:
    config = make_config(msgspec.structs.replace(SPEC, pooling=LATE))
    tokenizer = NoTokenizer(SPEC.vocab_size)
    return RequestChecks(config, tokenizer, EngineInfo(0, 1, "node", 64, 16, 256, "float32", {}, [1]))


def test_long_prompts_of_late_interaction_are_cut_in_both_checks(checks: RequestChecks) -> None:
    prompt, params = ParsedPrompt(None, list(range(20, 99)) * 9), PoolingParams(input_type="query")
    (found,) = checks.complete([Ask(prompt, params, "a")])
    assert len(found.ask.parsed.token_ids) == 12
    checks.check(prompt, params)
    marked = ParsedPrompt(None, [3, 8, *prompt.token_ids])
    with pytest.raises(RequestTooLarge):
        checks.check(marked, params)
