"""One path for requests to any endpoint, whose fields choose it."""

from __future__ import annotations

import pytest
from fake_engine import CLASSIFIES, EMBEDS, SCORES

MESSAGES = [{"role": "user", "content": "27 + 58?"}]


def test_a_model_that_generates_gets_prompts_and_conversations(client, engine):
    assert client.post("/invocations", {"prompt": "27 + 58 =", "x": 1}).json["object"] == "text_completion"
    answer = client.post("/invocations", {"messages": MESSAGES, "prompt": None, "x": 1})
    assert answer.json["object"] == "chat.completion"
    assert answer.headers["x-raycore-ignored-fields"] == "prompt, x"
    events = client.post("/invocations", {"messages": MESSAGES, "stream": True}).events
    assert events[0]["object"] == "chat.completion.chunk"
    assert client.post("/invocations", {"prompt": "1", "n": 0}).error == (400, "invalid_request_error", "n")
    assert len(engine.params) == 3


@pytest.mark.parametrize(
    ("spec", "body", "kind"),
    [
        (EMBEDS, {"input": "a"}, "embd-"),
        (EMBEDS, {"messages": MESSAGES}, "embd-"),
        (EMBEDS, {"texts": ["a"]}, "embd-"),
        (EMBEDS, {"input": "a", "task": "token_embed"}, "pooling-"),
        (CLASSIFIES, {"input": "a"}, "classify-"),
        (SCORES, {"text_1": "a", "text_2": "b"}, "score-"),
        (SCORES, {"queries": "a", "documents": ["b"]}, "score-"),
        (SCORES, {"query": "a", "documents": ["b"]}, "score-"),
        (SCORES, {"input": "a"}, "classify-"),
    ],
)
def test_a_model_that_pools_gets_the_requests_of_its_endpoints(pools, spec, body, kind):
    client, _ = pools(spec)
    assert client.post("/invocations", body).json["id"].startswith(kind)


@pytest.mark.parametrize("body", [{}, {"input": "a"}, {"prompt": None}])
def test_fields_of_no_endpoint_are_refused_with_those_that_the_model_has(client, body):
    answer = client.post("/invocations", body)
    assert answer.error == (400, "invalid_request_error", None)
    assert "messages for /v1/chat/completions; prompt for /v1/completions" in answer.json["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 50_000])
def test_what_is_no_object_is_refused(client, raw):
    assert client.post("/invocations", raw=[raw]).error[:2] == (400, "invalid_request_error")


def test_the_rules_of_the_chosen_endpoint_hold(serve, engine):
    client = serve(api_keys=("key",))
    assert client.post("/invocations", {"prompt": "1"}).status == 401
    assert client.post("/invocations", {"prompt": "1"}, headers={"authorization": "Bearer key"}).status == 200
    engine.unavailable_reason = "the engine is draining"
    assert client.post("/invocations", {"prompt": "1"}, headers={"authorization": "Bearer key"}).status == 503
    assert 'handler="/v1/completions"' in client.get("/metrics").body.decode()
