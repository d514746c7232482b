"""Endpoints that take tokens and give tokens, and those that say which tokens a request becomes."""

from __future__ import annotations

import json

import msgspec
import pytest
import tool_templates
from asgi_client import Client
from fake_engine import END_OF_TEXT, FakeEngine

from raycore.sampling_params import SamplingParams
from raycore.server import ServerOptions, build_app
from raycore.structured_outputs import StructuredOutputsParams

PROMPT = [5, 6, 7]
TEXT = " 85 is the answer"


@pytest.fixture
def tokens(engine: FakeEngine) -> list[int]:
    """What the engine generates."""
    return [*engine.tokenizer.encode(TEXT, add_special_tokens=False), END_OF_TEXT]


def generate(client: Client, params=None, **fields):
    return client.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params or {}, **fields})


def test_tokens_are_continued_with_tokens(client, engine, tokens):
    answer = generate(client, request_id="abc", model="fake").json
    assert answer["request_id"] == "generate-tokens-abc"
    assert (answer["model"], answer["output_mode"]) == ("fake", "tokens")
    assert answer["choices"] == [
        {
            "index": 0,
            "token_ids": tokens,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "weight_versions": [{"version": "default", "start": 0, "end": len(tokens)}],
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert answer["prompt_token_ids"] is None
    assert engine.asked == [PROMPT]
    assert engine.params == [SamplingParams(max_tokens=None, detokenize=False)]


def test_requests_are_aborted_by_their_ids(client, engine):
    ids = ["generate-tokens-a", "generate-tokens-b"]
    assert client.post("/inference/v1/abort_requests", {"request_ids": ids}).status == 200
    assert client.post("/inference/v1/abort_requests", {"request_ids": []}).status == 200
    for body in ({}, {"request_ids": None}, {"request_ids": "a"}):
        assert client.post("/inference/v1/abort_requests", body).error[0] == 400
    assert engine.calls == [("abort_requests", ids), ("abort_requests", [])]


def test_a_stream_has_the_tokens_as_they_come(client, engine, tokens):
    answer = generate(
        client, stream=True, stream_options={"include_usage": True}, return_token_ids=True, cache_salt="s", priority=3
    )
    *events, last = answer.events
    assert [event["choices"][0]["token_ids"] for event in events] == [[token] for token in tokens]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(tokens) - 1) + ["stop"]
    assert events[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in event for event in events[1:])
    assert all(event["usage"] is None for event in events)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(tokens))
    assert engine.cache_salts == ["s"]


def test_parameters_reach_the_engine(client, engine):
    params = {
        "n": 2,
        "temperature": 0.5,
        "max_tokens": 4,
        "seed": 7,
        "logit_bias": {"9": 2.0},
        "stop_token_ids": [8],
        "structured_outputs": {"json": {"type": "object"}, "regex": None, "_backend": None, "disable_fallback": False},
        "stop_after": "</think>",
        # as vLLM writes them
        "output_kind": 2,
        "skip_clone": True,
        "flat_logprobs": False,
        "extra_args": None,
        "output_text_buffer_length": 3,
        "_all_stop_token_ids": [1],
        "routed_experts_prompt_start": 0,
    }
    assert generate(client, params).status == 200
    assert engine.params == [
        SamplingParams(
            n=2,
            temperature=0.5,
            max_tokens=4,
            seed=7,
            logit_bias={9: 2.0},
            stop_token_ids=[8],
            structured_outputs=StructuredOutputsParams(json={"type": "object"}),
            stop_after="</think>",
            detokenize=False,
        )
    ]


def test_tokens_may_be_replayed(client, engine):
    assert generate(client, {"trace_decode_token_ids": [5, 6]}).status == 200
    assert engine.params == [SamplingParams(trace_decode_token_ids=[5, 6], detokenize=False)]


def test_the_checkpoints_own_parameters_are_not_used(client, engine):
    """Whoever renders the request has used them."""
    engine.default_sampling_params = {"temperature": 0.1}
    generate(client)
    assert engine.params[0].temperature == 1.0


def test_log_probabilities_are_by_token_id(client, tokens):
    choice = generate(client, {"logprobs": 2, "max_tokens": 1, "prompt_logprobs": 1}).json["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token_id"], entry["logprob"], entry["rank"]) == (tokens[0], -0.5, 1)
    assert [each.keys() for each in entry["top_logprobs"]] == [{"token_id", "logprob", "rank"}] * 2
    assert entry["top_logprobs"][0]["token_id"] == tokens[0]
    of_prompt = generate(client, {"max_tokens": 1, "prompt_logprobs": 1}).json["prompt_logprobs"]
    assert [
        of_prompt[0],
        *(str(token) in position for token, position in zip(PROMPT[1:], of_prompt[1:], strict=True)),
    ] == [
        None,
        True,
        True,
    ]


def test_text_comes_on_request(client, engine):
    asked = {"output_mode": "text", "params": {"stop": [" the"], "logprobs": 1}}
    answer = generate(client, **asked).json
    (choice,) = answer["choices"]
    assert (answer["output_mode"], choice["text"], choice["stop_reason"]) == ("text", " 85 is", " the")
    assert choice["logprobs"]["content"][0]["token"]
    assert engine.params[0].detokenize
    events = generate(client, stream=True, **asked).events
    assert "".join(event["choices"][0]["text"] for event in events) == " 85 is"
    assert events[-1]["choices"][0]["stop_reason"] == " the"


def test_stop_strings_need_text_that_is_not_sent(client, engine):
    (choice,) = generate(client, {"stop": [" the"]}).json["choices"]
    assert "text" not in choice
    assert choice["stop_reason"] == " the"
    assert engine.params[0].detokenize


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": ["a"]}, "token_ids", "token_ids.0"),
        ({"token_ids": [5, 99999]}, "prompt", "99999"),
        ({"token_ids": [5] * 300}, "token_ids", "maximum context length is 200"),
        ({"sampling_params": None}, "sampling_params", "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "temperature", "temperature=-1"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params", "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens", "max_tokens"),
        ({"sampling_params": {"use_warp": True}}, "sampling_params", "use_warp=True"),
        ({"sampling_params": {"prompt": "a"}}, "sampling_params", "prompt="),
        ({"sampling_params": {"n": 10000}}, "n", "n=10000"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode", "detokenize"),
        ({"sampling_params": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs", "regex"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params", "prompt_logprobs"),
        ({"sampling_params": {"reasoning_tags": {"opening": 4}}}, "sampling_params", "reasoning_tags="),
        ({"sampling_params": {"extra_args": 4}}, None, "extra_args=4"),
        ({"features": {"mm_hashes": {}}}, "features", "content_parts"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "kv_transfer_params"),
        ({"content_parts": [{"type": "audio_url", "url": "a"}]}, "content_parts", "content_parts[0]"),
        ({"content_parts": [{"type": "image_url", "url": "data:,a"}]}, "content_parts", "takes only texts"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"model": "other"}, "model", "other"),
    ],
)
def test_an_error_names_what_is_wrong(client, fields, param, words):
    answer = client.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}, **fields})
    assert answer.error == (404 if "model" in fields else 400, "invalid_request_error", param)
    assert words in answer.json["error"]["message"]


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
CHATS = {
    "plain": {},
    "sampled": {"temperature": 0.3, "top_k": 4, "seed": 5, "logit_bias": {"9": 1}, "stop": ["x"], "max_tokens": 5},
    "repetitions": {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
    "budget": {"thinking_token_budget": 20},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}},
}


@pytest.fixture
def routed() -> tuple[FakeEngine, Client]:
    engine = FakeEngine(max_model_len=2000)
    engine.default_sampling_params = {"top_p": 0.75}
    options = ServerOptions(("fake",), chat_template=tool_templates.THINKING, reasoning_parser="qwen3")
    return engine, Client(build_app(engine, options))


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_a_rendered_chat_generates_what_the_chat_does(routed, body):
    engine, client = routed
    asked = {"messages": [{"role": "user", "content": "27 + 58?"}], "return_token_ids": True, **body}
    engine.text = "So.</think>" + (
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>' if body else "85"
    )
    chat = client.post("/v1/chat/completions", asked).json
    rendered = client.post("/v1/chat/completions/render", asked)
    assert rendered.status == 200, rendered.body
    generated = client.post("/inference/v1/generate", rendered.json).json
    assert generated["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert engine.asked[0] == engine.asked[1] == rendered.json["token_ids"] == chat["prompt_token_ids"]
    first, second = (msgspec.structs.replace(each, detokenize=True, max_tokens=1) for each in engine.params)
    assert first == second
    assert engine.params[0].max_tokens == engine.params[1].max_tokens


def test_a_rendered_completion_is_a_list(client, engine):
    asked = {"prompt": ["a", "bc"], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    bodies = client.post("/v1/completions/render", {**asked, "cache_salt": "s", "priority": 2}).json
    assert len(bodies) == 2
    for body in bodies:
        assert (body["cache_salt"], body["priority"], body["stream"]) == ("s", 2, True)
        answer = client.post("/inference/v1/generate", body)
        assert answer.events[-1]["usage"]["completion_tokens"] == 3
    assert engine.asked == [body["token_ids"] for body in bodies]


def test_a_rendered_message_has_the_limit_of_its_request(routed):
    engine, client = routed
    asked = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    body = client.post("/v1/messages/render", asked).json
    assert body["sampling_params"]["max_tokens"] == 9
    client.post("/v1/messages", asked)
    assert engine.asked[0] == body["token_ids"]
    assert json.dumps(body)


def test_a_rendered_response_generates_what_the_response_does(routed):
    engine, client = routed
    engine.text = "So.</think>85"
    asked = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "27 + 58?"},
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "warm"},
        ],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "max_output_tokens": 9,
        "top_k": 4,
        "request_id": "1",
    }
    rendered = client.post("/v1/responses/render", {**asked, "stream": True, "cache_salt": "s"}).json
    assert (rendered["stream"], rendered["cache_salt"], rendered["request_id"]) == (True, "s", "resp-1")
    client.post("/inference/v1/generate", {**rendered, "stream": False})
    assert client.post("/v1/responses", {**asked, "store": False}).status == 200
    assert engine.asked == [rendered["token_ids"]] * 2
    first, second = (msgspec.structs.replace(each, detokenize=True) for each in engine.params)
    assert first == second
    assert (first.max_tokens, first.top_k) == (9, 4)


def test_only_whole_conversations_are_rendered(client):
    answer = client.post("/v1/responses/render", {"input": "a", "previous_response_id": "resp_1"})
    assert answer.error == (400, "invalid_request_error", "previous_response_id")
    assert client.post("/v1/responses/render", {"input": []}).error[2] == "input"


def test_rendering_refuses_what_the_request_itself_would_be_refused_for(client):
    answer = client.post("/v1/chat/completions/render", {"messages": []})
    assert answer.error == (400, "invalid_request_error", "messages")
    assert client.post("/v1/completions/render", {"prompt": "a", "n": 0}).error[2] == "n"
