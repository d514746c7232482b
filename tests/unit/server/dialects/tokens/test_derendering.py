"""A request that is rendered here, continued elsewhere, and derendered here has the answer of the request itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tool_templates
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.server import ServerOptions, build_app

ASKED = [{"role": "user", "content": "27 + 58?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("So.</think>\n\nEighty-five, é.", {}),
    "stop string": ("So.</think>One, two, three", {"stop": ["two"]}),
    "limit": ("So.</think>One, two, three", {"max_tokens": 12}),
    "log probabilities": ("So.</think>Five.", {"logprobs": True, "top_logprobs": 2}),
    "call": (f"So.</think>{CALL}", {"tools": [TOOL]}),
    "required call": (CALL.removeprefix("<tool_call>\n"), {"tools": [TOOL], "tool_choice": "required"}),
    "without reasoning": ("So.</think>Five.", {"include_reasoning": False}),
}
WITHOUT = ("id", "created", "usage", "prompt_token_ids")
"""Fields of a response that aren't compared."""


class Server:
    """A server whose model writes `text`."""

    def __init__(self, text: str, **options: Any) -> None:
        self.engine = FakeEngine(text, max_model_len=2000)
        self.client = Client(build_app(self.engine, ServerOptions(("fake",), **options)))

    def post(self, path: str, body: Any) -> Any:
        answer = self.client.post(path, body)
        assert answer.status == 200, answer.body
        return answer

    def generated(self, rendered: dict[str, Any]) -> dict[str, Any]:
        return self.post("/inference/v1/generate", rendered).json


def thinking(text: str) -> Server:
    return Server(text, chat_template=tool_templates.THINKING, reasoning_parser="qwen3")


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """What is compared: without ids, which are random."""
    kept = json.loads(json.dumps({name: value for name, value in answer.items() if name not in WITHOUT}))
    for choice in kept["choices"]:
        choice.pop("weight_versions", None)
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
    return kept


@pytest.mark.parametrize(("text", "body"), CHATS.values(), ids=CHATS)
def test_a_derendered_chat_is_the_chats_answer(text, body):
    server = thinking(text)
    asked = {"messages": ASKED, "max_tokens": 60, **body}
    expected = server.post("/v1/chat/completions", asked).json
    rendered = server.post("/v1/chat/completions/render", asked).json
    given = {
        "generate_response": server.generated(rendered),
        "chat_request": asked,
        "prompt_tokens": len(rendered["token_ids"]),
        "prompt_token_ids": rendered["token_ids"],
    }
    answer = server.post("/v1/chat/completions/derender", given).json
    assert plain(answer) == plain(expected)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == expected["usage"][name]
    assert answer["id"] == given["generate_response"]["request_id"]


@pytest.mark.parametrize(("text", "body"), CHATS.values(), ids=CHATS)
def test_a_derendered_stream_has_the_deltas_of_the_chats_stream(text, body):
    server = thinking(text)
    asked = {"messages": ASKED, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}, **body}
    expected = server.post("/v1/chat/completions", asked).events
    rendered = server.post("/v1/chat/completions/render", asked).json
    state, chunks = None, []
    for event in server.post("/inference/v1/generate", rendered).events:
        given = {"stream": True, "generate_chunk": event, "stream_state": state, "chat_request": asked}
        answer = server.post("/v1/chat/completions/derender", {**given, "prompt_token_ids": rendered["token_ids"]}).json
        state = answer["stream_state"]
        chunks.append(answer["chunk"])
    assert assembled(chunks) == assembled(expected)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["usage"]["completion_tokens"] == expected[-1]["usage"]["completion_tokens"]


def assembled(chunks: list[dict[str, Any]]) -> list[Any]:
    """Reasoning, content, arguments, finish reason and log probabilities of a stream."""
    texts = {"reasoning": "", "content": ""}
    arguments, names, reasons, logprobs = "", [], [], []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name in texts:
            texts[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            arguments += call["function"]["arguments"]
            names += [call["function"]["name"]] if "name" in call["function"] else []
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        logprobs += (choice["logprobs"] or {}).get("content", [])
    return [texts, names, arguments, reasons, logprobs]


@pytest.mark.parametrize("body", [{}, {"stop": "is"}, {"logprobs": 2}, {"n": 2, "temperature": 1.0}])
def test_derendered_completions_are_the_requests_answer(body):
    server = Server(" 85 is the answer")
    asked = {"prompt": ["27 + 58 =", "Why"], "max_tokens": 30, **body}
    expected = server.post("/v1/completions", asked).json
    rendered = server.post("/v1/completions/render", asked).json
    given = {
        "generate_responses": [server.generated(each) for each in rendered],
        "completion_request": asked,
        "prompt_tokens": [len(each["token_ids"]) for each in rendered],
        "prompt_token_ids": [each["token_ids"] for each in rendered],
    }
    answer = server.post("/v1/completions/derender", given).json
    assert plain(answer) == plain(expected)
    assert answer["usage"]["total_tokens"] == expected["usage"]["total_tokens"]


def test_a_derendered_stream_of_a_completion_has_its_text():
    server = Server(" 85 is é the answer")
    asked = {"prompt": "27 + 58 =", "max_tokens": 30, "stream": True, "stop": "answer"}
    (rendered,) = server.post("/v1/completions/render", asked).json
    state, text, reasons = None, "", []
    for event in server.post("/inference/v1/generate", rendered).events:
        given = {"stream": True, "generate_chunk": event, "stream_state": state, "completion_request": asked}
        answer = server.post("/v1/completions/derender", given).json
        state, (choice,) = answer["stream_state"], answer["chunk"]["choices"]
        text += choice["text"]
        reasons.append(choice["finish_reason"])
    assert text == " 85 is é the "
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


def test_without_the_request_all_text_is_content():
    server = Server(" 85 is the answer")
    response = server.generated({"token_ids": [5, 6, 7], "sampling_params": {}})
    answer = server.post("/v1/chat/completions/derender", {"generate_response": response}).json
    assert answer["choices"][0]["message"]["content"] == " 85 is the answer"
    assert answer["usage"]["prompt_tokens"] == 0
    completion = server.post("/v1/completions/derender", {"generate_responses": [response, response]}).json
    assert [(each["index"], each["text"]) for each in completion["choices"]] == [
        (0, " 85 is the answer"),
        (1, " 85 is the answer"),
    ]


RESPONSE = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5], "finish_reason": "length"}]}


def response(**fields: Any) -> dict[str, Any]:
    return {**RESPONSE, "choices": [{**RESPONSE["choices"][0], **fields}]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "generate_response is missing"),
        ({"stream": True}, "generate_chunk is missing"),
        ({"generate_response": {**RESPONSE, "output_mode": "text"}}, "output_mode"),
        ({"generate_response": {**RESPONSE, "choices": []}}, "has no choices"),
        ({"generate_response": response(token_ids=[])}, "token_ids is empty"),
        ({"generate_response": response(token_ids=[10**6])}, "isn't in the tokenizer's vocabulary"),
        ({"generate_response": response(token_ids=[5] * 2001)}, "the model's context has 2000"),
        ({"generate_response": response(logprobs={"content": []})}, "0 entries for 1 token_ids"),
        ({"stream": True, "generate_chunk": {**RESPONSE, "choices": RESPONSE["choices"] * 2}}, "2 choices"),
        (
            {"stream": True, "generate_chunk": RESPONSE, "stream_state": {"output_token_ids": [5]}},
            "output_chunk_lens sums up to 0",
        ),
        ({"generate_response": RESPONSE, "model": "other"}, "other"),
    ],
)
def test_what_cannot_be_derendered_is_refused(body, words):
    answer = Server("a").client.post("/v1/chat/completions/derender", body)
    assert answer.status == (404 if "model" in body else 400)
    assert words in answer.json["error"]["message"]


def test_parsers_need_the_request():
    answer = thinking("a").client.post("/v1/chat/completions/derender", {"generate_response": RESPONSE})
    assert answer.error == (400, "invalid_request_error", "chat_request")


@pytest.mark.parametrize(
    "body", [{"generate_responses": []}, {"generate_responses": [RESPONSE], "prompt_tokens": [1, 2]}]
)
def test_lists_have_an_entry_for_each_prompt(body):
    assert Server("a").client.post("/v1/completions/derender", body).status == 400
