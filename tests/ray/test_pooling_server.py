"""Servers of models that pool, as their users' clients meet them: the bundled model's embeddings and scores."""

from __future__ import annotations

import json
from functools import cache
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import torch
from conformance import check_operation
from encoder_checkpoints import make_encoder, reference
from openai_scenarios import SCENARIOS, Api, Scenario
from openai_scenarios.table import EMBEDS, SCORES
from openai_servers import KEY, MAX_MODEL_LEN, MODELS, raycore_server
from transformers import AutoTokenizer

from raycore import AsyncLLM
from raycore.demo import demo_model_path
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server import ServerOptions, build_app

TEXTS = ["27 + 58 =", "what is it?", "85"]


def engine_of(kind: str) -> AsyncLLM:
    # the table has float32's numbers
    return AsyncLLM(demo_model_path(), max_model_len=MAX_MODEL_LEN, num_threads=1, dtype="float32", **MODELS[kind])


@pytest.fixture(scope="module")
def embedder(ray_cluster):
    engine = engine_of(EMBEDS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def scorer(ray_cluster):
    engine = engine_of(SCORES)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def apis(embedder, scorer):
    with raycore_server(embedder) as embeds, raycore_server(scorer) as scores:
        yield {EMBEDS: embeds, SCORES: scores}


@pytest.fixture
def embeds(apis) -> Api:
    return apis[EMBEDS]


@pytest.mark.parametrize("row", [row for row in SCENARIOS if row.of in (EMBEDS, SCORES)], ids=lambda row: row.name)
def test_requests_get_the_answers_of_the_scenario_table(apis, row: Scenario):
    assert row.ask(apis[row.of]) == row.expected


def test_langchain_gets_embeddings(embeds, embedder, monkeypatch):
    """It sends lists of token ids, unless it is told to send texts."""
    langchain = pytest.importorskip("langchain_openai")
    own = {"model": embeds.model, "base_url": f"{embeds.root}/v1", "api_key": KEY}
    expected = [entry.embedding for entry in embeds.client.embeddings.create(model=embeds.model, input=TEXTS).data]
    texts = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **own)
    np.testing.assert_allclose(texts.embed_documents(TEXTS), expected, rtol=1e-5)
    np.testing.assert_allclose(texts.embed_query(TEXTS[0]), expected[0], rtol=1e-5)
    # its tokenizer is OpenAI's, which it downloads: here the model's own one takes its place
    encoding = Mock(**{"encode_ordinary.side_effect": embedder.get_tokenizer().encode})
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: encoding)
    np.testing.assert_allclose(langchain.OpenAIEmbeddings(**own).embed_documents(TEXTS), expected, rtol=1e-5)
    assert encoding.encode_ordinary.call_count == len(TEXTS)


@pytest.mark.parametrize("kind", [EMBEDS, SCORES])
def test_cohere_s_client_ranks_and_embeds(apis, kind):
    cohere = pytest.importorskip("cohere")
    api = apis[kind]
    client = cohere.ClientV2(api_key=KEY, base_url=api.root)
    ranked = client.rerank(model=api.model, query=TEXTS[0], documents=TEXTS, top_n=2)
    expected = api.post("/rerank", query=TEXTS[0], documents=TEXTS, top_n=2).json()["results"]
    assert [(each.index, each.relevance_score) for each in ranked.results] == [
        (each["index"], each["relevance_score"]) for each in expected
    ]
    if kind == EMBEDS:
        body = {"model": api.model, "texts": TEXTS, "embedding_types": ["float"]}
        embedded = client.embed(**body, input_type=None)
        np.testing.assert_allclose(
            embedded.embeddings.float_, api.post("/v2/embed", **body).json()["embeddings"]["float"]
        )


def test_a_client_of_jina_s_reranker_gets_what_it_documents(apis):
    api = apis[SCORES]
    body = {
        "model": api.model,
        "query": TEXTS[0],
        "documents": [{"text": text} for text in TEXTS],
        "top_n": 3,
        "return_documents": True,
    }
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{api.root}/v1/rerank", headers=headers, content=json.dumps(body)).json()
    assert answer["model"] == api.model
    assert answer["usage"]["total_tokens"] > 0
    scores = [entry["relevance_score"] for entry in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(entry["document"]["text"] == TEXTS[entry["index"]] for entry in answer["results"])


def test_a_cross_encoder_ranks_documents_as_transformers_scores_them(ray_cluster, tmp_path):
    """Its prompts have a separator, and two types of tokens."""
    path = make_encoder(tmp_path / "bert", "BertForSequenceClassification", num_labels=1)
    engine = AsyncLLM(str(path), num_threads=1, dtype="float32")
    try:
        with raycore_server(engine) as api:
            answer = api.post("/rerank", query="the fox", documents=["over it", "jumps", "the dog"]).json()
    finally:
        engine.shutdown()
    found = {entry["document"]["text"]: entry["relevance_score"] for entry in answer["results"]}
    tokenizer, model = AutoTokenizer.from_pretrained(path), reference(path)
    with torch.inference_mode():
        inputs = [tokenizer("the fox", each, return_token_type_ids=True, return_tensors="pt") for each in found]
        expected = [model(**each).logits.sigmoid().item() for each in inputs]
    assert max(each["token_type_ids"].max() for each in inputs) == 1
    assert list(found.values()) == pytest.approx(expected, abs=1e-4)
    assert expected == sorted(expected, reverse=True)


def test_metrics_count_requests_that_pool(embeds, embedder):
    before = sum(sum(each.num_finished.values()) for each in embedder.read_metrics().counts.values())
    embeds.client.embeddings.create(model=embeds.model, input=TEXTS)
    text = embeds.http.get("/metrics").text
    assert 'http_requests_total{handler="/v1/embeddings",method="POST",status="2xx"}' in text
    after = sum(sum(each.num_finished.values()) for each in embedder.read_metrics().counts.values())
    assert after == before + len(TEXTS)
    assert embeds.http.get("/load").json() == {"server_load": 0}


OPTIONS = ServerOptions(("demo",), max_sequences=4)
SPECS = {
    EMBEDS: PoolingSpec(tasks=["embed", "token_embed"], embedding_size=128, is_matryoshka=True),
    SCORES: PoolingSpec(tasks=["classify", "token_classify", "score"], embedding_size=128, num_labels=1),
}


@cache
def document(kind: str):
    """The OpenAPI document of a server whose engine hasn't been started yet."""
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_http_logprobs": 20, "get_tokenizer.return_value.vocab_size": 320}
    return build_app(Mock(pooling_spec=SPECS[kind], **sizes, **{"traces.is_on": False}), OPTIONS).openapi()


@cache
def app_of(engine: AsyncLLM):
    return build_app(engine, OPTIONS)


def test_the_documents_are_those_of_the_engines(embedder, scorer):
    for kind, engine in ((EMBEDS, embedder), (SCORES, scorer)):
        assert (engine.pooling_spec.tasks, engine.pooling_spec.embedding_size) == (SPECS[kind].tasks, 128)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed", "/pooling", "/rerank"])
def test_every_answer_of_embeddings_conforms_to_the_openapi_document(path, embedder):
    check_operation(document(EMBEDS), f"POST {path}", app_of(embedder))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ["/classify", "/score"])
def test_every_answer_of_scores_conforms_to_the_openapi_document(path, scorer):
    check_operation(document(SCORES), f"POST {path}", app_of(scorer))
