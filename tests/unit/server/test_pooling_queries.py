"""Queries and documents over HTTP, with models of late interaction: they are cut before their length is checked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raycore.parts.pooling.models.late_interaction import LateInteraction
from raycore.parts.pooling.models.pooling import PoolingSpec

SPEC = PoolingSpec(tasks=["token_embed"], embedding_size=16, late=LateInteraction(7, 8, 12, 9, expansion_token=6))
LONG = "a b " * 300
"""More tokens than the 200 that the model takes."""


def sent(engine: Any) -> list[list[int]]:
    return [each["prompt_token_ids"] for each in engine.prompts]


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_long_documents_are_cut(pools: Any, path: str) -> None:
    client, engine = pools(SPEC)
    names = ("query", "documents") if path == "/rerank" else ("text_1", "text_2")
    assert client.post(path, dict(zip(names, (LONG, [LONG, "a b"]), strict=True))).status == 200
    ids = engine.tokenizer.encode(LONG)
    assert sent(engine)[:2] == [SPEC.prompt(ids, "query"), SPEC.prompt(ids, "document")]
    assert [len(each) for each in sent(engine)] == [12, 9, len(engine.tokenizer.encode("a b")) + 1]


@pytest.mark.parametrize("kind", ["query", "document", None])
def test_long_inputs_are_cut_as_what_they_are(pools: Any, kind: str | None) -> None:
    client, engine = pools(SPEC)
    ids = engine.tokenizer.encode(LONG)
    for given in (LONG, [LONG], ids, [ids, ids]):
        assert client.post("/pooling", {"input": given, "input_type": kind}).status == 200
    messages = [{"role": "user", "content": LONG}]
    template = "{{ messages[0].content }}"
    body = {"messages": messages, "input_type": kind, "chat_template": template}
    client, other = pools(SPEC, trust_request_chat_template=True)
    assert client.post("/pooling", body).status == 200
    wanted: Any = kind or "document"
    assert [*sent(engine), *sent(other)] == [SPEC.prompt(ids, wanted)] * 6


def test_documents_are_cut_to_what_the_engine_takes(pools: Any) -> None:
    client, engine = pools(SPEC, max_model_len=8)
    for how in ({}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 8}):
        assert client.post("/pooling", {"input": LONG, "input_type": "document", **how}).status == 200
    assert [len(each) for each in sent(engine)] == [8, 8, 8]


def test_marked_token_ids_stay_and_have_their_length_checked(pools: Any) -> None:
    client, engine = pools(SPEC)
    marked = [3, SPEC.prompt([3, 4, 5], "query")[1], *range(10, 40)]
    assert client.post("/pooling", {"input": marked}).status == 200
    assert sent(engine) == [marked]
    answer = client.post("/pooling", {"input": [marked * 9, marked]})
    assert answer.error == (400, "invalid_request_error", "input")
    assert "input[0] has 288" in answer.json["error"]["message"]


def test_a_prompt_of_one_token_is_refused(pools: Any) -> None:
    client, engine = pools(SPEC)
    answer = client.post("/pooling", {"input": [[3, 4], [5]]})
    assert answer.error == (400, "invalid_request_error", "input")
    assert "input[1]: the prompt has only the token 5" in answer.json["error"]["message"]
    assert not engine.prompts


def test_a_text_gets_a_marker_whatever_it_begins_with(pools: Any) -> None:
    client, engine = pools(SPEC)
    ids = engine.tokenizer.encode("a fox")
    own = msgspec.structs.replace(SPEC, late=LateInteraction(ids[1], 8, 12, 9))
    client, engine = pools(own)
    assert client.post("/pooling", {"input": "a fox"}).status == 200
    assert client.post("/pooling", {"input": ids}).status == 200
    assert sent(engine) == [[ids[0], 8, *ids[1:]], ids]
