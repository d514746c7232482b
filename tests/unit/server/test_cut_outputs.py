"""What belongs to whom in an answer doesn't depend on how the engine's output is cut into pieces of news.

The engine tells of its output after each token, or after several. Every API is asked for the same output in many ways
to cut it, and what its client puts together is compared.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from itertools import combinations
from typing import Any

import pytest
from asgi_client import Answer, Client
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from responding import CALL, TOOL, events_of

from raycore.client.ask import Ask
from raycore.outputs import RequestOutput
from raycore.server import ServerOptions, build_app

Shown = dict[str, Any]

TOOLS = [{"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}]
MESSAGES = [{"role": "user", "content": "What time is it?"}]
OUTPUTS = [
    f"<think>So.</think>Seven.{CALL}",
    f"<think>So.</think>{CALL}\nto{CALL}</tool_call>to <tool",
    f"{CALL}Noon, 12 é ü 時.",
    "<think>never closed</thin",
]
SHORT = ["to</think>a <b", "é</think>\n to"]


class CutEngine(FakeEngine):
    """Tells of its output after these tokens, and at the end."""

    cuts: Collection[int] = ()

    async def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[RequestOutput, None]:
        async for output in super().ask(asks):
            if output.finished or len(output.outputs[0].token_ids) in self.cuts:
                yield output

    def num_tokens(self) -> int:
        return len(self.tokenizer.encode(self.text, add_special_tokens=False))


def responses(client: Client, stream: bool, **fields: Any) -> Shown:
    body = {"input": "What time is it?", "tools": [TOOL], "include": ["message.output_text.logprobs"], **fields}
    answer = ok(client.post("/v1/responses", body | {"stream": stream, "top_logprobs": 1}))
    if not stream:
        return response_shown(answer.json)
    events = events_of(answer)
    response = events[-1]["response"]
    deltas: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            deltas.setdefault(event["output_index"], []).extend(event["logprobs"])
    texts = {i: item["content"][0] for i, item in enumerate(response["output"]) if item["type"] == "message"}
    assert deltas == {i: part["logprobs"] for i, part in texts.items() if part["text"]}
    return response_shown(response)


def response_shown(response: dict[str, Any]) -> Shown:
    items: list[Any] = []
    for item in response["output"]:
        parts = [part for part in item.get("content", ()) if isinstance(part, dict)]
        items.append((item["type"], item["status"], item.get("arguments"), [part["text"] for part in parts]))
        items += [[each["token"] for each in part["logprobs"]] for part in parts if "logprobs" in part]
    return {"items": items, "usage": response["usage"], "status": response["status"]}


def chat(client: Client, stream: bool, **fields: Any) -> Shown:
    body = {"messages": MESSAGES, "tools": TOOLS, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    body |= {"stream": stream, **fields, **({"stream_options": {"include_usage": True}} if stream else {})}
    answer = ok(client.post("/v1/chat/completions", body))
    if not stream:
        (choice,) = answer.json["choices"]
        calls = [each["function"] for each in choice["message"].pop("tool_calls", [])]
        texts = {name: choice["message"].get(name) or "" for name in ("content", "reasoning")}
        return {
            **texts,
            "calls": [(each["name"], each["arguments"]) for each in calls],
            **{name: choice[name] for name in ("finish_reason", "stop_reason", "token_ids")},
            "logprobs": choice["logprobs"]["content"],
            "usage": answer.json["usage"],
        }
    shown: Shown = {"content": "", "reasoning": "", "calls": [], "stop_reason": None, "token_ids": [], "logprobs": []}
    for event in answer.events:
        shown["usage"] = event["usage"] or None if "usage" in event else None
        for choice in event["choices"]:
            for name in ("content", "reasoning"):
                shown[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls", ()):
                name, arguments = call["function"].get("name"), call["function"]["arguments"]
                if name is not None:
                    shown["calls"].append((name, ""))
                shown["calls"][-1] = (shown["calls"][-1][0], shown["calls"][-1][1] + arguments)
            shown["token_ids"] += choice.get("token_ids") or []
            shown["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            shown["finish_reason"] = choice["finish_reason"]
            shown["stop_reason"] = choice.get("stop_reason")
    return shown


def messages(client: Client, stream: bool, **fields: Any) -> Shown:
    tools = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
    body = {"model": "fake", "max_tokens": 2000, "messages": MESSAGES, "tools": tools, "stream": stream, **fields}
    answer = ok(client.post("/v1/messages", body))
    if not stream:
        message = answer.json
        blocks = [block_shown(block) for block in message["content"]]
        return {"blocks": blocks, **{name: message[name] for name in ("stop_reason", "stop_sequence", "usage")}}
    blocks: list[Any] = []
    texts: list[str] = []
    last: dict[str, Any] = {}
    for event in (json.loads(part.split("data: ")[1]) for part in answer.body.decode().split("\n\n")[:-1]):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += "".join(delta.get(name, "") for name in ("text", "thinking", "partial_json"))
        elif event["type"] == "message_delta":
            last = {**event["delta"], "usage": event["usage"]}
    for block, text in zip(blocks, texts, strict=True):
        block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
    return {"blocks": [block_shown(block) for block in blocks], **last}


def block_shown(block: dict[str, Any]) -> tuple[str, Any]:
    field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
    return block["type"], block[field]


def completions(client: Client, stream: bool, **fields: Any) -> Shown:
    body = {"prompt": "Time: ", "max_tokens": 2000, "logprobs": 1, "return_token_ids": True, "stream": stream, **fields}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = ok(client.post("/v1/completions", body))
    if not stream:
        (choice,) = answer.json["choices"]
        shown = {name: choice[name] for name in ("text", "finish_reason", "stop_reason", "token_ids")}
        return {**shown, "logprobs": choice["logprobs"], "usage": answer.json["usage"]}
    shown = {"text": "", "token_ids": [], "logprobs": {}}
    for event in answer.events:
        shown["usage"] = event["usage"]
        for choice in event["choices"]:
            shown["text"] += choice["text"]
            shown["token_ids"] += choice["token_ids"]
            for name, values in choice["logprobs"].items():
                shown["logprobs"][name] = shown["logprobs"].get(name, []) + values
            shown |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return shown


def generated(client: Client, stream: bool, **fields: Any) -> Shown:
    params = {"logprobs": 1, "max_tokens": 2000, **fields}
    body = {"model": "fake", "token_ids": [5, 6, 7], "sampling_params": params, "stream": stream, "output_mode": "text"}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = ok(client.post("/inference/v1/generate", body))
    events = answer.events if stream else [answer.json]
    shown: Shown = {"text": "", "token_ids": [], "logprobs": []}
    for event in events:
        shown["usage"] = event.get("usage") or shown.get("usage")
        for choice in event["choices"]:
            shown["text"] += choice["text"]
            shown["token_ids"] += choice["token_ids"]
            shown["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            shown |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return shown


def ok(answer: Answer) -> Answer:
    assert answer.status == 200, answer.body
    return answer


ASKS: dict[str, Callable[..., Shown]] = {
    "responses": responses,
    "chat": chat,
    "messages": messages,
    "completions": completions,
    "generate": generated,
}


@pytest.fixture(scope="module")
def served() -> tuple[CutEngine, Client]:
    engine = CutEngine(max_model_len=4000)
    options = ServerOptions(("fake",), reasoning_parser="qwen3", tool_call_parser="hermes")
    return engine, Client(build_app(engine, options))


def told(served: tuple[CutEngine, Client], ask: str, text: str, cuts: Collection[int] | None, **fields: Any) -> Shown:
    """What a client puts together. `cuts`: None: of the whole answer."""
    engine, client = served
    engine.text, engine.cuts = text, cuts or ()
    return ASKS[ask](client, cuts is not None, **fields)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("text", SHORT)
def test_every_piece_of_an_output_may_come_at_once(served: tuple[CutEngine, Client], ask: str, text: str) -> None:
    whole = told(served, ask, text, None)
    ends = range(1, served[0].num_tokens() + 1)
    for cuts in ((), ends, *combinations(ends, 2)):
        assert told(served, ask, text, cuts) == whole, cuts


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("text", OUTPUTS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_cut_of_an_output_gives_the_same_answer(
    served: tuple[CutEngine, Client], ask: str, text: str, data: st.DataObject
) -> None:
    whole = told(served, ask, text, None)
    num_tokens = served[0].num_tokens()
    every = data.draw(st.sampled_from([1, 2, 3, 7, 1000]))
    cuts = data.draw(st.sets(st.integers(1, num_tokens), max_size=8)) | set(range(every, num_tokens, every))
    assert told(served, ask, text, cuts) == whole


@pytest.mark.parametrize("ask", ["responses", "chat", "completions", "generate"])
@pytest.mark.parametrize("every", [1, 2, 5, 1000])
def test_an_output_that_ends_at_a_stop_string_has_the_same_answer(
    served: tuple[CutEngine, Client], ask: str, every: int
) -> None:
    text = "<think>So.</think>Seven days and nights"
    whole = told(served, ask, text, None, stop=["ys a"])
    assert told(served, ask, text, range(every, 99, every), stop=["ys a"]) == whole


@pytest.mark.parametrize("cuts", [None, range(1, 200), range(3, 200, 3), ()])
def test_the_entries_of_a_response_are_those_of_its_texts_tokens(
    served: tuple[CutEngine, Client], cuts: Collection[int] | None
) -> None:
    shown = told(served, "responses", f"<think>to</think>to{CALL}to e", cuts)
    tokens = [each for each in shown["items"] if isinstance(each, list)]
    assert ["".join(each) for each in tokens] == ["to", "to e"]
