"""Scores of pairs of texts and rankings of documents over HTTP, with models that score and with embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from asgi_client import Client
from fake_engine import CLASSIFIES, EMBEDS, SCORES, FakeEngine, pooled
from tokenizers import processors
from tokenizers_for_tests import byte_level, write

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.server import ServerOptions, build_app
from raycore.text.tokenizer import Tokenizer

QUERY, DOCUMENTS = "27 + 58?", ["85", "a fox", "so it is"]
HALF = "\ud800"
LATE = PoolingSpec(tasks=["token_embed"], embedding_size=16)
TEMPLATE = "{{ instruction }}|{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"


def result(engine: FakeEngine, spec: PoolingSpec, text: str, task: str):
    return pooled(spec, engine.tokenizer.encode(text), PoolingParams(task=task)).astype(np.float64)


def similarity(engine: FakeEngine, spec: PoolingSpec, query: str, document: str) -> float:
    """What each of the three kinds of models says of a pair of texts."""
    if spec is SCORES:
        return float(result(engine, spec, query + document, "score")[0])
    first, second = (result(engine, spec, text, spec.tasks[0]) for text in (query, document))
    if spec is EMBEDS:
        return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
    return float((first @ second.T).max(axis=1).sum())


@pytest.fixture(params=[SCORES, EMBEDS, LATE], ids=["one class", "embeddings", "embeddings of tokens"])
def spec(request) -> PoolingSpec:
    return request.param


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_each_of_many(pools, spec, names, path):
    client, engine = pools(spec)
    answer = client.post(path, dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json
    expected = [similarity(engine, spec, QUERY, document) for document in DOCUMENTS]
    assert answer["object"] == "list"
    assert answer["id"].startswith("score-")
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(i, "score") for i in range(3)]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected)
    num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in engine.prompts)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert len(engine.prompts) == (3 if spec is SCORES else 4), "the query's embedding is computed once"


def test_as_many_texts_are_scored_one_by_one(pools, spec):
    client, engine = pools(spec)
    queries = ["a", "b", "c"]
    scores = [entry["score"] for entry in client.post("/score", {"text_1": queries, "text_2": DOCUMENTS}).json["data"]]
    assert scores == pytest.approx([similarity(engine, spec, *pair) for pair in zip(queries, DOCUMENTS, strict=True)])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_scores(pools, spec, path):
    client, engine = pools(spec)
    answer = client.post(path, {"model": "fake", "query": QUERY, "documents": DOCUMENTS}).json
    scores = [similarity(engine, spec, QUERY, document) for document in DOCUMENTS]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [entry["index"] for entry in answer["results"]] == order
    assert [entry["document"] for entry in answer["results"]] == [{"text": DOCUMENTS[index]} for index in order]
    assert [entry["relevance_score"] for entry in answer["results"]] == pytest.approx([scores[i] for i in order])
    assert answer.keys() == {"id", "model", "usage", "results"}
    assert answer["usage"].keys() == {"prompt_tokens", "total_tokens"}
    two = client.post(path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": False}).json
    assert [entry.keys() for entry in two["results"]] == [{"index", "relevance_score"}] * 2
    assert [entry["index"] for entry in two["results"]] == order[:2]
    assert len(client.post(path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 9}).json["results"]) == 3


def test_equal_scores_keep_their_order_and_what_is_no_number_comes_last(pools, monkeypatch):
    client, _ = pools(SCORES)
    scores = iter([0.5, np.nan, 0.5, 0.75])
    monkeypatch.setattr("fake_engine.pooled", lambda *_: np.array([next(scores)], np.float32))
    ranked = client.post("/rerank", {"query": "a", "documents": list("bcde")}).json["results"]
    assert [(entry["index"], entry["relevance_score"]) for entry in ranked] == [
        (3, 0.75),
        (0, 0.5),
        (2, 0.5),
        (1, None),
    ]


def test_documents_have_three_forms(pools):
    client, engine = pools(SCORES)
    forms = ["a b", {"text": "a b"}, {"content": [{"type": "text", "text": "a b"}]}]
    scores = client.post("/score", {"text_1": QUERY, "text_2": forms}).json["data"]
    assert len({entry["score"] for entry in scores}) == 1
    assert client.post("/rerank", {"query": {"text": QUERY}, "documents": {"text": "a b"}}).status == 200
    assert engine.prompts[-1] == engine.prompts[0]


def test_a_model_of_pairs_gets_them_as_the_tokenizer_joins_them(tmp_path):
    """As BERT: with separators, and the second text as another type of token."""
    native = byte_level()
    ends = [(token, native.token_to_id(token)) for token in ("<s>", "</s>")]
    native.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ends
    )
    tokenizer = Tokenizer.from_dir(write(tmp_path, native))
    spec = PoolingSpec(tasks=["score"], embedding_size=16, num_labels=1, pairs="pair")
    engine = FakeEngine(pooling=spec, tokenizer=tokenizer)
    client = Client(build_app(engine, ServerOptions(("fake",))))
    body = {"query": "the fox", "documents": ["jumps", "over it"], "truncate_prompt_tokens": 9}
    assert client.post("/rerank", body).status == 200
    expected = list(tokenizer.encode_pairs([("the fox", "jumps"), ("the fox", "over it")], 9))
    assert [(each["prompt_token_ids"], each["token_type_ids"]) for each in engine.prompts] == [
        (pair.token_ids, pair.type_ids) for pair in expected
    ]
    assert max(len(pair.token_ids) for pair in expected) == 9


def test_a_score_template_gets_both_texts(pools):
    client, engine = pools(SCORES, chat_template=TEMPLATE)
    client.post("/score", {"text_1": "a", "text_2": "b", "instruction": "fit?"})
    client.post("/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"instruction": "fit?"}})
    assert [prompt["prompt_token_ids"] for prompt in engine.prompts] == [
        engine.tokenizer.encode("fit?|query:a;document:b;")
    ] * 2
    taken = {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"messages": []}}
    assert client.post("/score", taken).error == (400, "invalid_request_error", "chat_template_kwargs")


def test_each_text_and_the_whole_can_be_cut(pools, spec):
    client, engine = pools(spec)
    body = {"text_1": "a b c d", "text_2": "e f g h", "max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    assert client.post("/score", body).status == 200
    first, second = (engine.tokenizer.cut(body[name], most) for name, most in (("text_1", 2), ("text_2", 3)))
    texts = [first + second] if spec is SCORES else [first, second]
    assert [each["prompt_token_ids"] for each in engine.prompts] == [engine.tokenizer.encode(text) for text in texts]
    engine.prompts.clear()
    assert (
        client.post("/score", {"text_1": "a " * 999, "text_2": "b" * 999, "truncate_prompt_tokens": -1}).status == 200
    )
    assert max(len(each["prompt_token_ids"]) for each in engine.prompts) == 200
    assert client.post("/score", {"text_1": "a", "text_2": "b", "use_activation": False}).status == 200
    assert engine.pooling_params[-1].use_activation is False


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {}, "text_1", "exactly two lists of texts"),
        ("/score", {"text_1": "a"}, "text_1", "exactly two lists of texts"),
        ("/score", {"text_1": "a", "items": "b"}, "items", "exactly two lists of texts"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries", "exactly two lists of texts"),
        ("/score", {"text_1": "a", "text_2": None}, "text_1", "exactly two lists of texts"),
        ("/score", {"text_1": [], "text_2": "b"}, "text_1", "text_1 is empty"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 is empty"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 entries and text_2 1"),
        ("/score", {"text_1": ["a"] * 2, "text_2": ["c"] * 3}, "text_1", "text_1 has 2 entries and text_2 3"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 100_000}, "text_2", "text_2 has 100000 entries; at most 2048"),
        ("/score", {"text_1": "a", "text_2": 5}, "text_2", "string"),
        ("/score", {"text_1": "a", "text_2": [5]}, "text_2", "string"),
        ("/score", {"text_1": "a", "text_2": [HALF]}, "text_2", "half of a surrogate pair"),
        ("/score", {"text_1": "a", "text_2": {"text": HALF}}, "text_2", "half of a surrogate pair"),
        ("/score", {"text_1": "a", "text_2": {"text": 5}}, "text_2", "text_2.text is 5"),
        ("/score", {"text_1": "a", "text_2": ["b", {"x": 1}]}, "text_2", "text_2[1] has ['x']"),
        ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2", "image"),
        ("/score", {"text_1": "a", "text_2": {"content": "b"}}, "text_2", "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "template"),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"c": 1}},
            "chat_template_kwargs",
            "template",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc", "=-1 isn't in"),
        (
            "/score",
            {"text_1": "a", "text_2": "b", "max_tokens_per_query": 200},
            "max_tokens_per_query",
            "=200 isn't in",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 201}, "truncate_prompt_tokens", "=201"),
        ("/score", {"text_1": "a", "text_2": "b " * 300}, "text_2", "200 tokens"),
        ("/rerank", {"documents": ["a"]}, "query", "required"),
        ("/rerank", {"query": "a"}, "documents", "required"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query", "string"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n=-1 isn't at least 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 1.5}, "top_n", "integer"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "other"}, "model", "doesn't exist"),
    ],
)
@pytest.mark.parametrize("of", [SCORES, EMBEDS], ids=["one class", "embeddings"])
def test_a_mistake_is_named(pools, of, path, body: dict[str, Any], param, message):
    client, engine = pools(of)
    answer = client.post(path, body)
    assert answer.error == (404 if param == "model" else 400, "invalid_request_error", param), answer.json
    assert message in answer.json["error"]["message"]
    assert not engine.prompts


def test_a_client_that_leaves_takes_all_its_pairs_along(pools, spec):
    client, engine = pools(spec)
    engine.before_result = lambda: asyncio.sleep(60)
    assert client.post("/rerank", {"query": "a", "documents": ["b", "c"]}, leave_after=0).status == 499
    assert engine.num_underway == 0
    assert sorted(engine.aborted) == sorted(engine.request_ids)


def test_several_classes_are_no_score(pools):
    client: Client
    client, _ = pools(CLASSIFIES)
    answer = client.post("/rerank", {"query": "a", "documents": ["b"]})
    assert answer.error == (404, "invalid_request_error", None)
    assert "classify, token_classify" in answer.json["error"]["message"]
