"""Texts are refused and cut by their number of tokens, however many characters these have."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_client import Client
from fake_engine import CLASSIFIES, EMBEDS, SCORES, FakeEngine
from tokenizers_for_tests import word_piece, write

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server import ServerOptions, build_app
from raycore.text.tokenizer import Tokenizer

WIDE = " " * 5000 + "the" + " " * 5000 + "fox" + " " * 5000 + "(" + " " * 5000
"""3 tokens: white space has none."""
UNKNOWN = "the " + "h" * 5000 + " fox"
"""3 tokens: a long word is one unknown token."""
PAIRS = PoolingSpec(tasks=["score"], embedding_size=16, num_labels=1, pairs="pair")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


ROUTES: dict[str, tuple[PoolingSpec | None, Any]] = {
    "/v1/completions": (None, lambda text: {"prompt": text}),
    "/v1/chat/completions": (None, chat),
    "/v1/embeddings": (EMBEDS, lambda text: {"input": text}),
    "/v2/embed": (EMBEDS, lambda text: {"texts": [text], "truncate": "NONE"}),
    "/pooling": (EMBEDS, lambda text: {"input": text}),
    "/classify": (CLASSIFIES, lambda text: {"input": text}),
    "/score": (PAIRS, lambda text: {"text_1": "", "text_2": text}),
    "/rerank": (SCORES, lambda text: {"query": text, "documents": [" "]}),
    "/v1/rerank": (EMBEDS, lambda text: {"query": text, "documents": ["the"]}),
}


def server(tmp_path, pooling: PoolingSpec | None, max_model_len: int = 8) -> tuple[Client, FakeEngine]:
    tokenizer = Tokenizer.from_dir(write(tmp_path, word_piece(), {"chat_template": TEMPLATE}))
    engine = FakeEngine("the", max_model_len, tokenizer=tokenizer, pooling=pooling)
    return Client(build_app(engine, ServerOptions(("fake",)))), engine


def asked(engine: FakeEngine) -> list[int]:
    """The first prompt that the engine got."""
    return engine.asked[0] if engine.pooling_spec is None else engine.prompts[0]["prompt_token_ids"]


@pytest.mark.parametrize("text", [WIDE, UNKNOWN], ids=["white space", "an unknown word"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_long_text_of_few_tokens_is_taken_as_it_is(tmp_path, path, text):
    pooling, body = ROUTES[path]
    client, engine = server(tmp_path, pooling)
    answer = client.post(path, body(text))
    assert answer.status == 200, answer.json
    assert asked(engine) == engine.tokenizer.encode(text)
    assert len(asked(engine)) == 3


@pytest.mark.parametrize("path", ROUTES)
def test_a_text_of_too_many_tokens_is_refused_with_their_number(tmp_path, path):
    pooling, body = ROUTES[path]
    client, _ = server(tmp_path, pooling)
    answer = client.post(path, body("the " * 900))
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in answer.json["error"]["message"]
    assert "90" in answer.json["error"]["message"]


CUT: dict[str, tuple[PoolingSpec | None, Any]] = {
    **{path: ROUTES[path] for path in ROUTES if path != "/v2/embed"},
    "max_tokens_per_query": (SCORES, lambda text: {"query": text, "documents": [" "]}),
    "max_tokens_per_doc": (PAIRS, lambda text: {"query": "", "documents": [text]}),
    "max_tokens_per_query of embeddings": (EMBEDS, lambda text: {"query": text, "documents": ["the"]}),
}


@pytest.mark.parametrize("text", [WIDE, UNKNOWN], ids=["white space", "an unknown word"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", CUT)
def test_a_cut_leaves_the_tokens_that_were_asked_for(tmp_path, way, side, text):
    pooling, body = CUT[way]
    client, engine = server(tmp_path, pooling)
    whole = engine.tokenizer.encode(text)
    if way in ROUTES:
        path, how = way, {"truncate_prompt_tokens": 2, "truncation_side": side}
        kept = whole[-2:] if side == "left" else whole[:2]
    else:  # texts are cut at their ends
        path, how, kept = "/rerank", {way.partition(" ")[0]: 2}, whole[:2]
    answer = client.post(path, body(text) | how)
    assert answer.status == 200, answer.json
    assert asked(engine) == kept


@pytest.mark.parametrize(("truncate", "kept"), [("START", slice(-2, None)), ("END", slice(2))])
def test_a_cut_in_coheres_form_leaves_the_tokens_that_were_asked_for(tmp_path, truncate, kept):
    client, engine = server(tmp_path, EMBEDS)
    assert client.post("/v2/embed", {"texts": [WIDE], "truncate": truncate, "max_tokens": 2}).status == 200
    assert asked(engine) == engine.tokenizer.encode(WIDE)[kept]
