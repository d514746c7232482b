"""Requests as other servers take them: null, numbers as text, hints, unknown fields, prompts that are cut."""

from __future__ import annotations

import asyncio
import logging

import pytest

from raycore.server import ServerOptions
from raycore.server.batch.files import RequestLine
from raycore.server.batch.runner import run_lines
from raycore.server.contract.models import Models
from raycore.server.http.ignored_fields import HEADER, IgnoredFields, noting
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest

BOTH = (
    ({"nonsense": 1}, "nonsense"),
    ({"b": 1, "a": {"c": 2}}, "b, a"),
    ({"stream": True, "stream_options": {"include_usage": True, "more": 1}}, "stream_options.more"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"structured_outputs": {"regex": "a+", "backend": "x"}}, "structured_outputs.backend"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 2, "n": 2}, None),
    ({"early_stopping": True}, "early_stopping"),
    ({"early_stopping": False}, None),
    ({"guided_decoding_backend": "x", "guided_regex": "a"}, "guided_decoding_backend"),
    ({"stream_interval": 4}, "stream_interval"),
    ({"return_token_offsets": True, "mm_payload": "none", "routed_experts_prompt_start": 3}, None),
    ({"stream_options": {}}, None),
    ({"stream_options": None, "response_format": None, "tools": None}, None),
    ({"prompt_logprobs": 0, "stream": True}, None),
    ({"": 1}, ""),
    ({"é\n": 1}, "%C3%A9%0A"),
)
CHAT = (
    ({"store": True, "service_tier": "flex", "verbosity": "high"}, "store, service_tier, verbosity"),
    ({"store": False, "service_tier": "auto", "verbosity": None}, None),
    ({"modalities": ["text", "audio"], "audio": {"voice": "x"}}, "audio, modalities"),
    ({"functions": [], "function_call": "auto"}, "function_call, functions"),
    ({"prediction": {}, "web_search_options": {}, "moderation": {}}, "moderation, prediction, web_search_options"),
    ({"prompt_cache_options": {"ttl": "1h"}, "prompt_cache_retention": "24h"}, "prompt_cache_options"),
    ({"metadata": {"a": 1}, "user": "me", "documents": None, "tools": [], "tool_choice": "none"}, None),
    ({"tools": [{"function": {"name": "f"}, "cache_control": {}}]}, "tools.cache_control"),
    ({"top_logprobs": 0, "logprobs": None, "max_completion_tokens": None, "max_tokens": None}, None),
    ({"response_format": {"type": "text", "other": 1}}, None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "more": 1}}},
        "response_format.json_schema.more",
    ),
)


@pytest.mark.parametrize(("ask", "body", "ignored"), [
    *(("complete", *row) for row in BOTH if "tools" not in row[0]), *(("chat", *row) for row in (*BOTH, *CHAT))
])  # fmt: skip
def test_fields_that_are_ignored_are_named_in_a_header_and_refused_by_strict_fields(serve, ask, body, ignored):
    answer = getattr(serve(), ask)(**body)
    assert answer.status == 200, answer.body
    assert answer.headers.get(HEADER) == ignored
    strict = getattr(serve(strict_fields=True), ask)(**body)
    assert strict.status == (200 if ignored is None else 400), strict.body
    assert HEADER not in strict.headers


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/tokenize", {"prompt": "1", "nonsense": 1, "add_special_tokens": None}, "nonsense"),
        ("/tokenize", {"prompt": "1", "media_io_kwargs": {}, "mm_processor_kwargs": None}, None),
        ("/detokenize", {"tokens": ["5", 6.0], "nonsense": 1}, "nonsense"),
    ],
)
def test_other_endpoints_name_ignored_fields_too(client, path, body, ignored):
    answer = client.post(path, body)
    assert answer.status == 200, answer.body
    assert answer.headers.get(HEADER) == ignored


def test_numbers_and_truth_may_be_text(client, engine):
    numbers = {"temperature": "0.7", "top_p": "0.5", "top_k": "4", "seed": "5", "max_tokens": "3", "n": 2.0, "min_p": 0}
    assert client.complete(**numbers, echo="false", logit_bias={"5": "1.5"}).status == 200
    assert client.chat(**numbers, stream="no", logprobs=1, logit_bias={"5": "1.5"}).status == 200
    for params in engine.params:
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.5, 4, 5)
        assert (params.max_tokens, params.n, params.logit_bias) == (3, 2, {5: 1.5})
    assert engine.params[1].logprobs == 0
    for wrong in ({"temperature": "hot"}, {"n": "1.5"}, {"seed": ""}, {"stream": "often"}, {"top_p": "nan"}):
        assert client.complete(**wrong).error == (400, "invalid_request_error", *wrong)


@pytest.mark.parametrize("body", [CompletionRequest, ChatCompletionRequest])
def test_every_field_may_be_null(client, body: type[SamplingRequest]):
    fields = dict.fromkeys(body.model_fields.keys() - {"prompt", "messages"})
    answer = client.complete(**fields) if body is CompletionRequest else client.chat(**fields)
    assert answer.status == 200, answer.body
    assert HEADER not in answer.headers


def test_a_response_names_only_some_of_many_ignored_fields(client):
    names = client.complete(**{f"x{i}": 1 for i in range(500)}, **{"y" * 5000: 1}).headers[HEADER]
    assert names.startswith("x0, x1, ")
    assert names.endswith("x19, and 481 more")
    fields = IgnoredFields(is_strict=False)
    fields.names["y" * 5000] = None
    assert fields.shown == "y" * 100


def test_ignored_fields_are_logged_once(client, caplog):
    with caplog.at_level(logging.WARNING, "raycore.server.http.ignored_fields"):
        for _ in range(3):
            client.complete(never_heard_of=1)
    lines = [record.getMessage() for record in caplog.records if record.name == "raycore.server.http.ignored_fields"]
    assert len(lines) == 1
    assert "/v1/completions: ignored the fields never_heard_of" in lines[0]


def test_requests_at_the_same_time_do_not_share_ignored_fields(client):
    async def test():
        return await asyncio.gather(
            *(client.call("POST", "/v1/completions", {"prompt": "1", f"x{i}": 1}) for i in range(5)),
            client.call("POST", "/v1/completions", {"prompt": "1"}),
        )

    answers = asyncio.run(test())
    assert [answer.headers.get(HEADER) for answer in answers] == ["x0", "x1", "x2", "x3", "x4", None]


@pytest.mark.parametrize("is_strict", [False, True])
def test_lines_of_a_batch_have_ignored_fields(engine, caplog, is_strict):
    options, results = ServerOptions(("fake",), strict_fields=is_strict), []
    text = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1", "in_a_batch": 1}}'
    lines = iter([RequestLine(1, text, "a")])
    work = run_lines(
        engine, options, Models(("fake",)), lines, results.append, max_concurrent=1, is_stopping=lambda: False
    )
    asyncio.run(work)
    assert results[0].response.status_code == (400 if is_strict else 200)
    assert ("ignored the fields in_a_batch" in caplog.text) is not is_strict


def test_without_a_request_unknown_fields_are_ignored():
    assert CompletionRequest.model_validate({"prompt": "1", "x": 1}).prompt == "1"
    with noting(ServerOptions(("fake",))) as fields:
        CompletionRequest.model_validate({"prompt": "1", "x": 1})
    assert list(fields.names) == ["x"]


# ---- prompts that are cut


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({"truncate_prompt_tokens": 200}, slice(None)),
        ({"truncation_side": "left"}, slice(None)),
    ],
)
def test_a_prompt_is_cut_as_the_request_says(client, engine, fields, kept):
    text = "27 + 58 ="
    ids = engine.get_tokenizer().encode(text)
    for prompt in (text, ids):
        choice = client.complete(prompt=prompt, return_token_ids=True, echo=True, **fields).json["choices"][0]
        assert choice["prompt_token_ids"] == ids[kept]
        assert choice["text"].startswith(engine.get_tokenizer().decode(ids[kept]))
    plain = client.chat(return_token_ids=True).json["prompt_token_ids"]
    assert client.chat(return_token_ids=True, **fields).json["prompt_token_ids"] == plain[kept]


def test_a_prompt_that_is_too_long_is_cut_to_leave_room_for_output(client, engine):
    for prompt in ("1 " * 5000, [5] * 5000):
        answer = client.complete(prompt=prompt, truncate_prompt_tokens=-1, return_token_ids=True).json["choices"][0]
        assert len(answer["prompt_token_ids"]) == 199
        assert len(answer["token_ids"]) == 1
        assert client.complete(prompt=prompt).error[0] == 400
    messages = [{"role": "user", "content": "1 " * 5000}]
    ids = client.chat(messages=messages, truncate_prompt_tokens=-1, return_token_ids=True).json["prompt_token_ids"]
    assert ids[-1] == client.chat(return_token_ids=True).json["prompt_token_ids"][-1]


def test_max_tokens_beyond_the_models_length_end_there_unless_strict(serve):
    for ask in ("complete", "chat"):
        assert getattr(serve(), ask)(max_tokens=10_000).status == 200
        answer = getattr(serve(strict_max_tokens=True), ask)(max_tokens=10_000)
        assert answer.error == (400, "invalid_request_error", "max_tokens")
        assert answer.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"guided_json": {"type": "integer"}}, {"json": '{"type": "integer"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ],
)
def test_constraints_have_older_names_and_completions_a_response_format(client, engine, fields, asked):
    assert client.complete(**fields).status == client.chat(**fields).status == 200
    for params in engine.params:
        assert {name: getattr(params.structured_outputs, name) for name in asked} == asked


def test_documents_are_variables_of_the_chat_template(serve):
    template = "{% for d in documents or [] %}{{ d.text }};{% endfor %}{{ messages[0].content }}"
    client = serve(chat_template=template)
    asked = {"documents": [{"text": "one"}, {"text": "two"}], "return_token_ids": True}
    ids = client.chat(**asked).json["prompt_token_ids"]
    assert client.post("/detokenize", {"tokens": ids}).json["prompt"].startswith("one;two;")


def test_an_echo_of_token_ids_has_their_special_tokens(client, engine):
    end = engine.get_tokenizer().eos_token_id
    choice = client.complete(prompt=[end, 21, 26], echo=True).json["choices"][0]
    assert choice["text"].startswith("<|endoftext|>27")


def test_a_chat_shows_its_rendered_prompt_on_request(serve):
    client = serve(chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert client.chat(return_prompt_text=True).json["prompt_text"] == "[27 + 58?]"
    assert "prompt_text" not in client.chat().json
    first, *others = client.chat(return_prompt_text=True, stream=True).events
    assert first["prompt_text"] == "[27 + 58?]"
    assert not any("prompt_text" in event for event in others)
