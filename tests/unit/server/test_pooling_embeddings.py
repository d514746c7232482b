"""Embeddings, classes and other results of prompts over HTTP: what is asked for, in which form, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest
from asgi_client import Client
from fake_engine import CLASSIFIES, EMBEDS, SCORES, FakeEngine, pooled

from raycore.errors import RequestFailed
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams

TEXTS = ["27 + 58 =", "what is it?"]
MESSAGES = [{"role": "user", "content": "27 + 58?"}]
HALF = "\ud800"


@pytest.fixture
def server(pools):
    return pools(EMBEDS)


@pytest.fixture
def client(server) -> Client:
    return server[0]


@pytest.fixture
def engine(server) -> FakeEngine:
    return server[1]


def embed(client: Client, path: str = "/v1/embeddings", **body: Any):
    return client.post(path, body)


def expected(engine: FakeEngine, spec: PoolingSpec = EMBEDS, **params: Any) -> list[list[float]]:
    """The results of the prompts that the engine got."""
    return [pooled(spec, prompt["prompt_token_ids"], PoolingParams(**params)).tolist() for prompt in engine.prompts]


def test_a_response_has_the_embeddings_of_all_inputs_in_order(client, engine):
    answer = embed(client, input=TEXTS, model="fake", user="me").json
    ids = [engine.tokenizer.encode(text) for text in TEXTS]
    assert [prompt["prompt_token_ids"] for prompt in engine.prompts] == ids
    num_tokens = sum(map(len, ids))
    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 1e9
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [{"index": i, "object": "embedding", "embedding": row} for i, row in enumerate(expected(engine))],
        "usage": {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    "given",
    [TEXTS[0], TEXTS, [5, 6, 7], [[5, 6, 7], [8]], MESSAGES, [MESSAGES, MESSAGES]],
    ids=["text", "texts", "token ids", "lists of token ids", "messages", "conversations"],
)
def test_inputs_have_six_forms(client, engine, given):
    template = engine.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    conversation = engine.tokenizer.encode(template, add_special_tokens=False)
    prompts = {
        json.dumps(TEXTS[0]): [engine.tokenizer.encode(TEXTS[0])],
        json.dumps(TEXTS): [engine.tokenizer.encode(text) for text in TEXTS],
        "[5, 6, 7]": [[5, 6, 7]],
        "[[5, 6, 7], [8]]": [[5, 6, 7], [8]],
        json.dumps(MESSAGES): [conversation],
        json.dumps([MESSAGES, MESSAGES]): [conversation, conversation],
    }
    answer = embed(client, input=given)
    assert answer.status == 200, answer.json
    assert [prompt["prompt_token_ids"] for prompt in engine.prompts] == prompts[json.dumps(given)]
    assert [entry["embedding"] for entry in answer.json["data"]] == expected(engine)
    if isinstance(given, list) and isinstance(given[0], (dict, list)) and "user" in json.dumps(given):
        assert embed(client, messages=given).json["data"] == answer.json["data"]


def test_conversations_are_rendered_as_the_request_says(client, engine):
    embed(client, messages=MESSAGES, add_generation_prompt=True, chat_template_kwargs={"x": 1})
    text = engine.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert engine.prompts[0]["prompt_token_ids"] == engine.tokenizer.encode(text, add_special_tokens=False)
    error = embed(client, messages=MESSAGES, chat_template="{{ 1 }}").error
    assert error == (400, "invalid_request_error", "chat_template")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_base64_and_bytes_are_the_same_numbers(client, engine, dtype):
    fields = {"input": TEXTS, "embed_dtype": dtype, "endianness": "big"}
    stored = np.dtype(dtype).newbyteorder(">")
    as_text = embed(client, **fields, encoding_format="base64").json["data"]
    rows = [np.frombuffer(base64.b64decode(entry["embedding"]), stored) for entry in as_text]
    np.testing.assert_array_equal(rows, np.array(expected(engine), np.float32).astype(dtype))
    as_bytes = embed(client, **fields, encoding_format="bytes")
    assert as_bytes.headers["content-type"] == "application/octet-stream"
    told = json.loads(as_bytes.headers["metadata"])
    assert told["usage"].keys() == {"prompt_tokens", "total_tokens"}
    for entry, row in zip(told["data"], rows, strict=True):
        assert (entry["embed_dtype"], entry["endianness"], entry["shape"]) == (dtype, "big", [16])
        np.testing.assert_array_equal(np.frombuffer(as_bytes.body[entry["start"] : entry["end"]], stored), row)
    only = embed(client, **fields, encoding_format="bytes_only")
    assert only.body == as_bytes.body
    assert "metadata" not in only.headers


def test_what_is_asked_of_the_model_reaches_the_engine(client, engine):
    headers = {"X-data-parallel-rank": "1", "X-Request-Id": "mine"}
    body = {"input": TEXTS, "dimensions": 8, "use_activation": False, "cache_salt": "salt", "priority": 3}
    answer = client.post("/v1/embeddings", body, headers=headers).json
    assert [len(entry["embedding"]) for entry in answer["data"]] == [8, 8]
    assert [(each.task, each.dimensions, each.use_activation) for each in engine.pooling_params] == [
        ("embed", 8, False)
    ] * 2
    assert engine.cache_salts == ["salt"] * 2
    assert engine.dp_ranks == [1, 1]
    assert answer["id"].startswith("embd-mine")
    assert engine.request_ids == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert embed(client, input="a", normalize=False).status == 200
    assert engine.pooling_params[-1].use_activation is False, "the older name"


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_long_prompts_are_cut_if_the_request_says_so(client, engine, side):
    fields = {} if side is None else {"truncation_side": side}
    assert embed(client, input=["a b c d e"], truncate_prompt_tokens=3, **fields).status == 200
    assert embed(client, input=[[5, 6, 7, 8]], truncate_prompt_tokens=3, **fields).status == 200
    assert embed(client, input="a " * 3000, truncate_prompt_tokens=-1, **fields).status == 200
    ids = engine.tokenizer.encode("a b c d e")
    cut = (lambda ids, most: ids[-most:]) if side == "left" else (lambda ids, most: ids[:most])
    prompts = [prompt["prompt_token_ids"] for prompt in engine.prompts]
    assert prompts == [cut(ids, 3), cut([5, 6, 7, 8], 3), cut(engine.tokenizer.encode("a " * 3000), 200)]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "exactly one of input and messages"),
        ({"input": "a", "messages": MESSAGES}, "input", "exactly one of input and messages"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ""}, "input", "input='' has no tokens"),
        ({"input": ["a", ""]}, "input", "input[1]='' has no tokens"),
        ({"input": [[5], []]}, "input", "input[1] is an empty list"),
        ({"input": 5}, "input", "string"),
        ({"input": {"a": 1}}, "input", "string"),
        ({"input": [5, "a"]}, "input", "input.token_ids.1"),
        ({"input": ["a", 5]}, "input", "input.texts.1"),
        ({"input": [1.5]}, "input", "input.token_ids.0"),
        ({"input": [[5, None]]}, "input", "input.lists_of_token_ids.0.1"),
        ({"input": [5, 320]}, "input", "input: the prompt contains token id 320"),
        ({"input": [[5], [-1]]}, "input", "input[1]: the prompt contains token id -1"),
        ({"input": [[5], [10**30]]}, "input", "input[1]"),
        ({"input": [5] * 201}, "input", "200 tokens, but input has 201"),
        ({"input": [[5], [5] * 201]}, "input", "200 tokens, but input[1] has 201"),
        ({"input": "a b " * 200}, "input", "200 tokens, but input has"),
        ({"input": ["a"] * 100_000}, "input", "input has 100000 entries; at most 2048"),
        ({"input": [[5]] * 2049}, "input", "input has 2049 entries; at most 2048"),
        ({"input": HALF}, "input", "half of a surrogate pair"),
        ({"input": ["a", HALF]}, "input", "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": HALF}]}, "messages", "half of a surrogate pair"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [[]]}, "messages", "at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x" * 10_000}]}]},
            "messages",
            "characters): only text parts are supported",
        ),
        ({"messages": [{"role": "user"}]}, "messages", "no 'content'"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "set only one",
        ),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions=0 isn't in [1, 16]"),
        ({"input": "a", "dimensions": 17}, "dimensions", "dimensions=17"),
        ({"input": "a", "dimensions": "few"}, "dimensions", "valid integer"),
        ({"input": "a", "dimensions": 10**30}, "dimensions", "isn't in [1, 16]"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format='hex' is not supported"),
        ({"input": "a", "embed_dtype": "int4"}, "embed_dtype", "embed_dtype='int4' is not supported"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "truncate_prompt_tokens=-2"),
        ({"input": "a", "truncate_prompt_tokens": 201}, "truncate_prompt_tokens", "truncate_prompt_tokens=201"),
        ({"input": [5, 6], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens=0"),
        ({"input": "a", "truncation_side": "top"}, "truncation_side", "truncation_side='top'"),
        ({"input": "a", "padding": "max_length"}, "padding", "'max_length' isn't supported"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "contradicts"),
        ({"input": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "isn't supported"),
        ({"input": "a", "model": "other"}, "model", "'other' doesn't exist"),
        ({"input": "a", "request_id": HALF}, "request_id", "half of a surrogate pair"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "at least 1"),
    ],
)
def test_a_mistake_is_named(client, engine, body, param, message):
    answer = embed(client, **body)
    assert answer.error == (404 if param == "model" else 400, "invalid_request_error", param), answer.json
    assert message in answer.json["error"]["message"]
    assert not engine.prompts


@pytest.mark.parametrize("raw", [b"", b"{", b'{"input": NaN}', b'{"input": [NaN]}', b"[]", b"null", b'"a"'])
def test_what_is_no_object_is_refused(client, raw):
    answer = asyncio.run(client.call("POST", "/v1/embeddings", raw=[raw]))
    assert answer.status == 400


def test_results_that_are_not_finite_are_null(client, monkeypatch):
    data = np.array([1.5, np.nan, -np.inf], np.float32)
    monkeypatch.setattr("fake_engine.pooled", lambda *_: data)
    assert embed(client, input="a").json["data"][0]["embedding"] == [1.5, None, None]
    text = embed(client, input="a", encoding_format="base64").json["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), np.float32), data)


def test_a_client_that_leaves_takes_all_its_prompts_along(client, engine):
    engine.before_result = lambda: asyncio.sleep(60)
    answer = client.post("/v1/embeddings", {"input": TEXTS}, leave_after=0)
    assert answer.status == 499
    assert engine.num_underway == 0
    assert sorted(engine.aborted) == sorted(engine.request_ids)


def test_a_prompt_that_fails_ends_the_others(client, engine):
    results = iter([None])

    def fails_second():
        if next(results, "failed") == "failed":
            raise RequestFailed("worker died too often")

    engine.before_result = fails_second
    answer = embed(client, input=TEXTS)
    assert answer.status == 500
    assert "worker died too often" in answer.json["error"]["message"]
    assert engine.num_underway == 0


def test_classes_have_labels_and_probabilities(pools):
    client, engine = pools(CLASSIFIES)
    answer = client.post("/classify", {"input": TEXTS}).json
    rows = expected(engine, CLASSIFIES)
    assert answer["object"] == "list"
    assert answer["id"].startswith("classify-")
    labels = [CLASSIFIES.labels[int(np.argmax(row))] for row in rows]
    assert answer["data"] == [
        {"index": i, "label": label, "probs": row, "num_classes": 3}
        for i, (label, row) in enumerate(zip(labels, rows, strict=True))
    ]
    assert client.post("/classify", {"messages": MESSAGES, "use_activation": False}).status == 200
    assert engine.pooling_params[-1].use_activation is False
    assert client.post("/classify", {"input": "a", "dimensions": 2}).headers["x-raycore-ignored-fields"] == "dimensions"


def test_classes_without_names_have_no_label(pools):
    client, _ = pools(PoolingSpec(tasks=["classify"], embedding_size=16, num_labels=3))
    assert client.post("/classify", {"input": "a"}).json["data"][0]["label"] is None


@pytest.mark.parametrize(
    ("spec", "task", "kind"),
    [
        (EMBEDS, None, "embed"),
        (EMBEDS, "token_embed", "token_embed"),
        (CLASSIFIES, "token_classify", "token_classify"),
        (SCORES, "score", "score"),
    ],
)
def test_any_task_of_the_model_can_be_asked_for(pools, spec, task, kind):
    client, engine = pools(spec)
    body = {"input": TEXTS} if task is None else {"input": TEXTS, "task": task}
    answer = client.post("/pooling", body).json
    rows = expected(engine, spec, task=kind)
    assert answer["data"] == [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)]
    stored = client.post("/pooling", {**body, "encoding_format": "base64"}).json["data"][1]["data"]
    flat = np.frombuffer(base64.b64decode(stored), np.float32)
    np.testing.assert_array_equal(flat, np.array(rows[1], np.float32).ravel())


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"task": "classify"}, "task", "task='classify' isn't one of this model's tasks: embed, token_embed"),
        ({"task": "nonsense"}, "task", "task='nonsense' isn't one of"),
        ({"task": 1}, "task", "valid string"),
        ({"data": {"a": 1}}, "data", "use input or messages"),
        ({"dimensions": 99, "task": "token_embed"}, "dimensions", "99"),
    ],
)
def test_a_task_that_the_model_has_not_got_is_refused(client, body, param, message):
    answer = client.post("/pooling", {"input": "a", **body})
    assert answer.error == (400, "invalid_request_error", param)
    assert message in answer.json["error"]["message"]


def test_cohere_s_requests_get_cohere_s_responses(client, engine):
    body = {"model": "fake", "texts": TEXTS, "embedding_types": ["float", "base64", "binary", "ubinary"]}
    answer = client.post("/v2/embed", body).json
    rows = np.array(expected(engine), np.float32)
    found = answer["embeddings"]
    assert found["float"] == rows.tolist()
    stored = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in found["base64"]]
    assert stored == rows.tolist()
    bits = np.packbits(rows >= 0, axis=1)
    assert found["ubinary"] == bits.tolist()
    assert found["binary"] == (bits.astype(int) - 128).tolist()
    assert answer["texts"] == TEXTS
    assert answer["response_type"] == "embeddings_by_type"
    num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in engine.prompts)
    assert answer["meta"]["billed_units"]["input_tokens"] == num_tokens
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    assert client.post("/v2/embed", {"inputs": inputs}).json["embeddings"]["float"] == rows.tolist()


def test_cohere_s_inputs_get_the_checkpoint_s_prompts(client, engine):
    engine.named_prompts = {"query": "find: "}
    assert client.post("/v2/embed", {"texts": ["a"], "input_type": "query"}).status == 200
    assert engine.prompts[-1]["prompt_token_ids"] == engine.tokenizer.encode("find: a")
    answer = client.post("/v2/embed", {"texts": ["a"], "input_type": "search_query"})
    assert answer.error[2] == "input_type"
    assert "use 'query'" in answer.json["error"]["message"]


@pytest.mark.parametrize(("truncate", "start"), [("END", 0), ("START", 2)])
def test_cohere_s_inputs_are_cut_by_default(client, engine, truncate, start):
    ids = engine.tokenizer.encode("a b c")
    most = len(ids) - start - (0 if start else 2)
    assert client.post("/v2/embed", {"texts": ["a b c"], "truncate": truncate, "max_tokens": most}).status == 200
    assert engine.prompts[-1]["prompt_token_ids"] == (ids[-most:] if start else ids[:most])
    assert client.post("/v2/embed", {"texts": ["a " * 3000]}).status == 200
    assert len(engine.prompts[-1]["prompt_token_ids"]) == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": []}, "texts"),
        ({"inputs": []}, "inputs"),
        ({"texts": [HALF]}, "texts"),
        ({"inputs": [{"content": [{"type": "text", "text": HALF}]}]}, "inputs"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs"),
        ({"images": ["data:"]}, "images"),
        ({"texts": ["a"], "input_type": "query"}, "input_type"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 99}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 3, "embedding_types": ["binary"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a b c d"], "max_tokens": 1, "truncate": "NONE"}, "texts"),
        ({"texts": ["a b " * 200], "truncate": "NONE"}, "texts"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
    ],
)
def test_mistakes_in_cohere_s_requests_are_named(client, body, param):
    assert client.post("/v2/embed", body).error == (400, "invalid_request_error", param)
