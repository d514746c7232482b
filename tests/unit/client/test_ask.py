"""Requests as values: what a call's arguments make of them, and what ranks are told."""

from __future__ import annotations

from typing import Any

import pytest
from asks import checked

from raycore.client.ask import asks_of
from raycore.client.inputs import ParsedPrompt
from raycore.client.updates import COALESCE_S, STOP_STRING_COALESCE_S
from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams

PROMPTS = [ParsedPrompt(None, [1]), ParsedPrompt(None, [2])]
ADAPTER = LoRARequest("a", 1, "/a")


def test_what_a_call_asks_for_once_is_asked_for_each_prompt() -> None:
    params = SamplingParams()
    asks = asks_of(PROMPTS, params, ADAPTER, 3)
    assert [ask.parsed for ask in asks] == PROMPTS
    assert all((ask.params, ask.lora, ask.priority, ask.stream) == (params, ADAPTER, 3, False) for ask in asks)
    assert len({ask.request_id for ask in asks}) == 2


def test_what_a_call_asks_for_each_prompt_keeps_its_order() -> None:
    params = [SamplingParams(top_k=1), SamplingParams(top_k=2)]
    asks = asks_of(PROMPTS, params, [None, ADAPTER], [4, 5])
    assert [(ask.params, ask.lora, ask.priority) for ask in asks] == [(params[0], None, 4), (params[1], ADAPTER, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": [SamplingParams()]}, "1 sampling_params for 2 prompts"),
        ({"params": {"top_k": 1}}, "isn't a SamplingParams"),
        ({"lora_request": [None]}, "lora_request has 1 entries for 2 prompts"),
        ({"lora_request": "a"}, "lora_request='a' isn't a LoRARequest"),
        ({"priority": [1]}, "1 priorities for 2 prompts"),
    ],
)
def test_an_argument_for_other_prompts_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        asks_of(PROMPTS, **{"params": SamplingParams(), **options})


@pytest.mark.parametrize(
    ("params", "stream", "interval_s"),
    [
        (SamplingParams(), False, COALESCE_S),
        (SamplingParams(stop="x"), False, STOP_STRING_COALESCE_S),
        (SamplingParams(), True, 0.0),
        (SamplingParams(stop="x"), "text", 0.0),
        (PoolingParams(task="embed"), False, 0.0),
    ],
)
def test_tokens_are_held_back_only_of_requests_that_do_not_stream(params: Any, stream: Any, interval_s: float) -> None:
    assert checked("a", [1], params, stream=stream).flush_interval_s == interval_s
