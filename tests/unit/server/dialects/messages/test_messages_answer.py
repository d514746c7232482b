"""Anthropic's Messages API as the official client meets it. The engine writes given texts, a few characters a token."""

from __future__ import annotations

import asyncio
import json

import anthropic
import httpx2
import pytest
import tool_templates
from asgi_client import Client
from fake_engine import FakeEngine
from pydantic import BaseModel

from raycore.errors import EngineDeadError
from raycore.server import ServerOptions, build_app

WEATHER = {
    "name": "get_weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASKED = [{"role": "user", "content": "How warm is it?"}]
TOKEN_COUNTS = {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}


class Server:
    """A server whose model writes `text`, whatever it is asked."""

    def __init__(self, text=" 85 is the answer", template=tool_templates.HERMES, max_model_len=4000, **options):
        self.engine = FakeEngine(text, max_model_len=max_model_len)
        self.app = build_app(self.engine, ServerOptions(("fake",), chat_template=template, **options))
        self.raw = Client(self.app)

    def with_sdk(self, use, **options):
        """What `use(client)` returns for the official client."""

        async def run():
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))
            settings = {"api_key": "none", "base_url": "http://test", "max_retries": 0, **options}
            async with anthropic.AsyncAnthropic(http_client=http, **settings) as client:
                return await use(client)

        return asyncio.run(run())

    def message(self, **fields):
        """The message that the official client gets, the same whole and streamed."""
        asked = {"model": "fake", "max_tokens": 1000, "messages": ASKED, **fields}

        async def both(client):
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                return whole, await stream.get_final_message()

        whole, streamed = self.with_sdk(both)
        assert comparable(whole) == comparable(streamed)
        return whole

    def events(self, **fields):
        """The events of a stream, each with its name checked."""
        answer = self.raw.post(
            "/v1/messages", {"model": "fake", "max_tokens": 1000, "messages": ASKED, "stream": True, **fields}
        )
        assert answer.status == 200, answer.body
        events = []
        for each in answer.body.decode().split("\n\n")[:-1]:
            name, data = each.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    def prompt(self):
        """The text of the last prompt."""
        ids = self.engine.asked[-1]
        return self.engine.get_tokenizer().decode(ids, skip_special_tokens=False)


def comparable(message):
    """A message without what differs from one request to the next."""
    fields = message.model_dump(exclude_none=True)
    for block in fields["content"]:
        assert ("signature" in block) == (block["type"] == "thinking")
        assert block.pop("signature", "-")
        block.pop("id", None)
    assert fields.pop("id").startswith("msg_")
    return fields


def test_a_text_is_answered_with_a_message():
    message = Server().message()
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": " 85 is the answer"}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 4
    assert message.usage.input_tokens > 4
    assert message.usage.cache_read_input_tokens == 0
    assert message.usage.output_tokens_details is None


def test_the_events_of_a_stream():
    start, ping, *middle, end, stop = Server("abc").events()
    message = start["message"]
    assert (start["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    assert message["usage"]["input_tokens"] > 4
    assert message["usage"]["output_tokens"] == 0
    assert ping == {"type": "ping"}
    assert middle[0] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert middle[-1] == {"type": "content_block_stop", "index": 0}
    texts = [event["delta"].pop("text") for event in middle[1:-1]]
    assert "".join(texts) == "abc"
    assert all(
        event == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta"}} for event in middle[1:-1]
    )
    assert end["type"] == "message_delta"
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"].keys() >= TOKEN_COUNTS
    assert end["usage"]["output_tokens"] >= len(texts)
    assert stop == {"type": "message_stop"}


def test_reasoning_text_and_calls_are_blocks():
    server = Server(
        f"It may rain.</think>Let me see.\n{CALL}\n{CALL}", tool_templates.THINKING, reasoning_parser="qwen3"
    )
    message = server.message(tools=[WEATHER])
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "It may rain.")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "get_weather", {"city": "Köln"})] * 2
    assert calls[0].id != calls[1].id
    assert message.stop_reason == "tool_use"
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_each_block_of_a_stream_begins_and_ends_before_the_next():
    server = Server(f"Rain?</think>Let me see.\n{CALL}", tool_templates.THINKING, reasoning_parser="qwen3")
    events = [event for event in server.events(tools=[WEATHER]) if event["type"].startswith("content_block")]
    kinds = []
    for event in events:
        if event["type"] == "content_block_start":
            kinds.append([event["content_block"]["type"]])
        else:
            kinds[event["index"]].append(event.get("delta", event)["type"])
        assert event["index"] == len(kinds) - 1
    assert [list(dict.fromkeys(each)) for each in kinds] == [
        ["thinking", "thinking_delta", "signature_delta", "content_block_stop"],
        ["text", "text_delta", "content_block_stop"],
        ["tool_use", "input_json_delta", "content_block_stop"],
    ]
    assert kinds[0].count("signature_delta") == 1


def test_a_tools_result_comes_back_to_the_model():
    """The loop that agents run: what the client got is sent back, with the result."""
    server = Server(CALL)
    first = server.message(tools=[WEATHER])
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees", "is_error": False}
    turns = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    server.engine.text = "It is warm."
    second = server.message(tools=[WEATHER], messages=turns)
    assert second.content[0].text == "It is warm."
    assert '{"city": "Köln"}' in server.prompt()
    assert "<|im_start|>tool\n21 degrees<|im_end|>" in server.prompt()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_required(choice):
    message = Server(' {"city": "Ulm"}}').message(tools=[WEATHER], tool_choice=choice)
    assert [(block.name, block.input) for block in message.content] == [("get_weather", {"city": "Ulm"})]
    assert message.stop_reason == "tool_use"


def test_tools_that_may_not_be_called_are_not_shown():
    server = Server(CALL)
    (block,) = server.message(tools=[WEATHER], tool_choice={"type": "none"}).content
    assert block.text == CALL
    assert "get_weather" not in server.prompt()


def test_a_stop_sequence_is_named():
    message = Server("One, two, three").message(stop_sequences=["three", "two"])
    assert message.content[0].text == "One, "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")


@pytest.mark.parametrize(("stop", "reason"), [("Köln", "stop_sequence"), ("</tool_call>", "tool_use")])
def test_a_call_that_a_stop_sequence_cuts_off_is_not_to_be_run(stop, reason):
    server = Server(CALL)
    message = server.message(tools=[WEATHER], stop_sequences=[stop])
    assert message.stop_reason == reason
    assert (message.content[0].input == {"city": "Köln"}) == (reason == "tool_use")


def test_an_answer_ends_at_its_limit():
    message = Server().message(max_tokens=2)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 2


def test_arguments_that_the_limit_cuts_off_are_as_complete_as_can_be():
    server = Server(CALL.replace("Köln", "Ulm and Bonn"))
    num_tokens = len(server.engine.get_tokenizer().encode(server.engine.text, add_special_tokens=False))
    inputs = []
    for max_tokens in range(num_tokens - 15, num_tokens - 3):
        message = server.message(tools=[WEATHER], max_tokens=max_tokens)
        assert message.stop_reason == "max_tokens"
        inputs.append(message.content[0].input)
    assert inputs[0] == {}
    assert inputs[-1] == {"city": "Ulm and Bonn"}


def test_an_answer_ends_where_the_models_context_does():
    server = Server("word " * 200, max_model_len=100)
    message = server.message(max_tokens=2000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 100
    assert server.message(max_tokens=10).stop_reason == "max_tokens"


def test_an_empty_answer_has_an_empty_text():
    assert [block.text for block in Server("").message().content] == [""]


def test_an_answer_that_the_request_begins_is_continued():
    server = Server(" 20 degrees")
    message = server.message(messages=[*ASKED, {"role": "assistant", "content": "It is"}])
    assert message.content[0].text == " 20 degrees"
    assert server.prompt().endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize("written", ['{"city": Köln}', '{"city": "Köln",}', '{"city": "Köln"]'])
def test_arguments_that_are_no_object_reach_the_client_as_the_model_wrote_them(written):
    server = Server("I'll look." + CALL.replace('{"city": "Köln"}', written))
    asked = {"model": "fake", "max_tokens": 1000, "messages": ASKED, "tools": [WEATHER]}
    answer = server.raw.post("/v1/messages", asked)
    assert answer.status == 200
    text, call = answer.json["content"]
    assert (text["text"], call["name"], call["input"]) == ("I'll look.", "get_weather", {"INVALID_JSON": written})
    assert answer.json["stop_reason"] == "tool_use"
    events = server.events(tools=[WEATHER])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == written
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-1] == {"type": "message_stop"}


def test_a_format_constrains_the_text_and_the_client_parses_it():
    class Town(BaseModel):
        name: str

    async def parse(client):
        return await client.messages.parse(model="fake", max_tokens=100, messages=ASKED, output_format=Town)

    server = Server('{"name": "Ulm"}')
    assert server.with_sdk(parse).parsed_output == Town(name="Ulm")
    assert "name" in json.dumps(server.engine.params[-1].structured_outputs.json)


def test_sampling_parameters_reach_the_engine():
    server = Server()
    # newer clients have no parameters for these, older ones do
    body = {"temperature": 0.25, "top_p": 0.5, "top_k": 3}
    server.message(extra_body=body, metadata={"user_id": "u"}, service_tier="auto")
    params = server.engine.params[-1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 3, 1000)


def test_thinking_can_be_turned_off():
    server = Server("So.</think>Yes.", tool_templates.QWEN3, reasoning_parser="qwen3")
    assert [block.type for block in server.message().content] == ["thinking", "text"]
    server.message(thinking={"type": "disabled"})
    assert server.prompt().endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("parser", ["qwen3", None])
def test_thinking_has_a_budget_where_reasoning_is_known(parser):
    server = Server("So.</think>Yes.", tool_templates.QWEN3, reasoning_parser=parser)
    message = server.message(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert message.content[0].type == ("thinking" if parser else "text")
    if parser:
        assert server.engine.params[-1].thinking_token_budget == 1024


def test_tokens_are_counted_without_a_limit():
    server = Server(max_model_len=100)
    asked = {"model": "fake", "messages": ASKED, "system": "Be brief.", "tools": [WEATHER]}

    async def count(client):
        return (await client.messages.count_tokens(**asked)).input_tokens

    async def answer(client):
        return (await client.messages.create(**asked, max_tokens=1)).usage.input_tokens

    num_tokens = server.with_sdk(count)
    assert num_tokens > 30
    assert num_tokens == Server(max_model_len=4000).with_sdk(answer)
    long = {"model": "fake", "messages": [{"role": "user", "content": "word " * 500}]}
    assert server.raw.post("/v1/messages/count_tokens", long).json["input_tokens"] > 500


def agent_request():
    """A request as agents for programming send it."""
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "edits": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "old": {"type": "string", "description": "What is replaced."},
                        "new": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "mode": {"enum": ["once", "all"], "default": "once"},
                    },
                    "required": ["old", "new"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["edits"],
        "additionalProperties": False,
    }
    tools = [{"name": f"tool_{i}", "description": "Edits. " * 20, "input_schema": schema} for i in range(20)]
    call = {"type": "tool_use", "id": "toolu_01", "name": "tool_3", "input": {"edits": [{"old": "a", "new": None}]}}
    failed = {"type": "tool_result", "tool_use_id": "toolu_01", "content": "<tool_use_error>No file.", "is_error": True}
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    return {
        "model": "fake",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000"},
            {"type": "text", "text": "You are an agent. " * 100, **ephemeral},
        ],
        "messages": [
            {"role": "user", "content": [reminder, {"type": "text", "text": "Mend it.", **ephemeral}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "I look."}, {**call, "caller": {"type": "direct"}}],
            },
            {"role": "user", "content": [{**failed, **ephemeral}, reminder]},
        ],
        "tools": [*tools[:-1], {**tools[-1], **ephemeral, "eager_input_streaming": True}],
        "metadata": {"user_id": json.dumps({"session": "x"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    }


def test_the_request_of_an_agent_works():
    written = CALL.replace("get_weather", "tool_3").replace('{"city": "Köln"}', '{"edits": []}')
    server = Server(written, max_model_len=15900)
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    answer = server.raw.post("/v1/messages?beta=true", agent_request(), headers=headers)
    assert answer.status == 200, answer.body
    assert b'"stop_reason":"tool_use"' in answer.body
    assert "cch=" not in server.prompt()
    assert "<|im_start|>tool\nError: <tool_use_error>No file.<|im_end|>" in server.prompt()


def error_of(server, *, key="none", **fields):
    """The official client's exception for a request."""

    async def ask(client):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**{"model": "fake", "max_tokens": 9, "messages": ASKED, **fields})
        return caught.value

    return server.with_sdk(ask, api_key=key)


@pytest.mark.parametrize(
    ("options", "fields", "kind", "type_"),
    [
        ({}, {"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({}, {"extra_body": {"top_p": 7.0}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"api_keys": ("secret",)}, {}, anthropic.AuthenticationError, "authentication_error"),
        ({}, {"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_body_bytes": 10}, {}, anthropic.ContentTooLargeError, "request_too_large"),
    ],
)
def test_errors_are_those_of_the_client(options, fields, kind, type_):
    error = error_of(Server(**options), **fields)
    assert type(error) is kind
    assert error.body["error"]["type"] == type_
    assert error.body["error"]["message"]
    assert error.request_id
    assert error.body["request_id"] == error.request_id


def test_too_many_requests():
    server = Server(max_streams=1)
    asked = {"model": "fake", "max_tokens": 9, "messages": ASKED}

    async def ask_twice(client):
        go_on = asyncio.Event()
        server.engine.at_token = lambda index: go_on.wait()
        first = asyncio.ensure_future(client.messages.create(**asked))
        while not server.engine.num_underway:
            await asyncio.sleep(0)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**asked)
        go_on.set()
        await first
        return caught.value.body["error"]["type"]

    assert server.with_sdk(ask_twice) == "rate_limit_error"


def test_an_engine_that_is_unavailable_and_one_that_fails():
    server = Server()
    server.engine.unavailable_reason = "the engine is draining"
    assert isinstance(error_of(server), anthropic.ServiceUnavailableError)
    server.engine.unavailable_reason = None

    def fail(index):
        if index == 2:
            raise EngineDeadError("rank 0 died")

    server.engine.at_token = fail
    assert error_of(server).status_code == 503
    last = server.events()[-1]
    assert (last["type"], last["error"]) == ("error", {"type": "overloaded_error", "message": "rank 0 died"})


def test_keys_come_in_either_header():
    server = Server(api_keys=("secret",))
    asked = {"model": "fake", "max_tokens": 9, "messages": ASKED}
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert server.raw.post("/v1/messages", asked, headers=headers).status == 200
    for headers in ({"x-api-key": "Secret"}, {"x-api-key": "Bearer secret"}, {"authorization": "secret"}, {}):
        assert server.raw.post("/v1/messages", asked, headers=headers).status == 401


def test_paths_and_methods_that_do_not_exist_have_errors_of_this_api():
    server = Server()
    for method, path, status in (("POST", "/v1/messages/batches", 404), ("GET", "/v1/messages", 405)):
        answer = asyncio.run(server.raw.call(method, path))
        assert (answer.status, answer.json["type"]) == (status, "error")
    assert server.raw.get("/v1/messagesx").json["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_sequences": ["a"] * 100}, "stop_sequences has 100 strings"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "prompt is too long"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
    ],
)
def test_errors_name_the_fields_of_this_api(fields, words):
    answer = Server().raw.post("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": ASKED, **fields})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json["error"]["message"]
