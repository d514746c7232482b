"""`prompt_embeds` of `/v1/completions`."""

from __future__ import annotations

import io
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import SPEC, make_config

from raycore.client.inputs import OnlyText
from raycore.client.prompt_embeds import PromptEmbeds
from raycore.parts.images.config import EncoderLimits

TEXT = " 85 is the answer"


def encoded(num_tokens: int, width: int = SPEC.hidden_size, seed: int = 0) -> str:
    file = io.BytesIO()
    torch.save(torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16(), file)
    return b64encode(file.getvalue()).decode()


@pytest.fixture
def embeds_client(client: Any, engine: Any) -> Any:
    engine.images = OnlyText("fake", PromptEmbeds(make_config(max_model_len=200)))
    engine._limits = replace(engine._limits, encoder=EncoderLimits(128, 128))
    return client


def test_embeddings_are_completed_before_the_prompt_if_both_are_given(embeds_client: Any) -> None:
    answer = embeds_client.complete(prompt=None, prompt_embeds=encoded(9), max_tokens=100).json
    assert [choice["text"] for choice in answer["choices"]] == [TEXT]
    assert answer["usage"]["prompt_tokens"] == 9
    body = {"prompt_embeds": [encoded(9), encoded(60)], "prompt": [5, 6], "max_tokens": 100, "return_token_ids": True}
    answer = embeds_client.complete(**body).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [None, None, [5, 6]]
    assert answer["usage"]["prompt_tokens"] == 9 + 60 + 2
    events = embeds_client.complete(prompt=None, prompt_embeds=encoded(9), max_tokens=100, stream=True).events
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == TEXT


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt_embeds": "no base64!"}, "prompt_embeds", "prompt_embeds isn't the base64 of one tensor"),
        ({"prompt_embeds": [encoded(9), encoded(9, 31)]}, "prompt_embeds", "prompt_embeds[1]: the embeddings are of"),
        ({"prompt_embeds": encoded(200)}, "prompt", "maximum context length is 200"),
        ({"prompt_embeds": encoded(201)}, "prompt_embeds", "201 embeddings, more than max_model_len=200"),
        ({"prompt_embeds": "A" * 400_000}, "prompt_embeds", "prompt_embeds has more bytes than max_model_len=200"),
        ({"prompt_embeds": encoded(9), "echo": True}, "echo", "echo needs the prompt's tokens"),
        ({"prompt_embeds": encoded(9), "prompt_logprobs": 1}, "prompt_logprobs", "needs the prompt's tokens"),
        ({"prompt_embeds": [encoded(9)] * 5}, "prompt_embeds", "prompt_embeds has 5 entries; at most 4"),
        ({"prompt_embeds": [encoded(9)] * 3, "prompt": [[5], [6]]}, "prompt", "prompt has 5 entries; at most 4"),
        ({"prompt_embeds": []}, "prompt", "prompt is missing"),
        ({"prompt_embeds": 5}, "prompt_embeds", "string"),
    ],
)
def test_what_cannot_be_used_is_refused(
    serve: Any, embeds_client: Any, fields: dict[str, Any], param: str, message: str
) -> None:
    response = serve(max_sequences=4).complete(**({"prompt": None, "max_tokens": 5} | fields))
    assert response.error == (400, "invalid_request_error", param)
    assert message in response.json["error"]["message"]


def test_servers_that_have_not_been_asked_to_take_embeddings_refuse_them(client: Any) -> None:
    response = client.complete(prompt=None, prompt_embeds=encoded(9))
    assert response.error == (400, "invalid_request_error", "prompt_embeds")
    assert "--enable-prompt-embeds" in response.json["error"]["message"]
