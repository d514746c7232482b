"""Whatever the server writes as JSON is JSON."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.messages import TokenLogprobs
from raycore.server import ServerOptions, build_app, load_adapters
from raycore.server.batch.files import Response, Result, ResultFile
from raycore.server.http.json_text import to_json

HALF = "half a character: \ud83c"
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def strict(text):
    """Decode JSON as a strict client does."""

    def refuse(name):
        raise AssertionError(f"{name} isn't JSON")

    return json.loads(text.decode("utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(value):
    assert strict(to_json({"a": [value, 1.5], HALF: {"b": (value, HALF)}})) == {
        "a": [None, 1.5],
        HALF.replace("\ud83c", "?"): {"b": [None, HALF.replace("\ud83c", "?")]},
    }


class OddEngine(FakeEngine):
    """Its log probabilities are no numbers, and so are the defaults of its sampling parameters."""

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        return TokenLogprobs([token_id, 5, 6, 7], [math.nan, -math.inf, math.inf, -1.0], 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"logprobs": 4}),
        ("/v1/completions", {"logprobs": 4, "echo": True, "prompt_logprobs": 4}),
        ("/v1/completions", {"logprobs": 4, "echo": True, "stream": True, "stream_options": USAGE}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 4, "prompt_logprobs": 4}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 4, "stream": True, "stream_options": USAGE}),
        ("/v1/completions", {"model": f"not served: {HALF}"}),
        ("/v1/models", None),
        ("/openapi.json", None),
    ],
)
def test_every_answer_is_valid_json_despite_odd_numbers_and_half_surrogate_pairs(path, body):
    options = ServerOptions((HALF,))
    engine = OddEngine()
    client = Client(build_app(engine, options, asyncio.run(load_adapters(engine, options))))
    prompt = {"messages": [{"role": "user", "content": "1"}]} if "chat" in path else {"prompt": "27 + 58 ="}
    answer = client.get(path) if body is None else client.post(path, prompt | body)
    assert answer.status == (404 if body and "model" in body else 200), answer.body
    parts = answer.body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
    for part in filter(None, parts):
        strict(part.removeprefix(b"data: "))


def test_batch_results_are_valid_json_despite_nan_and_half_surrogate_pairs(tmp_path: Path):
    body = {"choices": [{"logprobs": math.nan, "text": HALF}]}
    with ResultFile(tmp_path / "out.jsonl", {"a": 1}) as file:
        file.begin()
        file.append(Result("batch_req_1", "a", Response(200, "req_1", body), None))
    (line,) = (tmp_path / "out.jsonl").read_bytes().splitlines()
    choice = {"logprobs": None, "text": HALF.replace("\ud83c", "?")}
    assert strict(line)["response"]["body"] == {"choices": [choice]}
