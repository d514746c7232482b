"""Chats with gpt-oss, by what clients send and get. The engine writes given texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tool_templates
from allowed_texts import fits
from asgi_client import Client
from fake_engine import FakeEngine
from tokenizers_for_tests import demo_with_special_tokens

from raycore.server import ServerOptions, build_app
from raycore.server.parsers.tool_calls.harmony import HarmonyToolParser
from raycore.text.tokenizer import Tokenizer

ASKED = [{"role": "user", "content": "What time is it?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
ANALYSIS = "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"city": "Ulm"}'
FINAL = "<|channel|>final<|message|>It is seven."


class GptOss:
    """A server whose model writes `text`, whatever it is asked."""

    def __init__(self, text: str, tokenizer_dir: Path, reasoning_parser: str | None = "openai_gptoss") -> None:
        self.engine = FakeEngine(text, max_model_len=4000)
        self.engine.tokenizer = Tokenizer.from_dir(tokenizer_dir)
        self.engine.check = lambda *_: None  # its model doesn't know the added tokens
        template = tool_templates.HARMONY
        options = ServerOptions(("fake",), chat_template=template, reasoning_parser=reasoning_parser)
        self._client = Client(build_app(self.engine, options))

    def message(self, **body) -> tuple[str | None, str | None, list[tuple[str, str]], str]:
        """The reasoning, the content, the calls and the finish reason, the same whole and streamed."""
        body = {"max_tokens": 1000, "messages": ASKED, **body}
        (choice,) = self._client.chat(**body).json["choices"]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        events = self._client.chat(stream=True, **body).events
        deltas = [each["delta"] for event in events for each in event["choices"]]
        for part in ("reasoning", "content"):
            assert "".join(delta.get(part) or "" for delta in deltas) == (message.get(part) or "")
        streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(call.get("arguments", "") for call in streamed) == "".join(call[1] for call in calls)
        return message.get("reasoning"), message["content"], calls, choice["finish_reason"]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("harmony")
    demo_with_special_tokens(folder, HarmonyToolParser.tags())
    return folder


def test_chats_in_harmony_have_reasoning_calls_and_content(tokenizer_dir: Path) -> None:
    called = ("I need it.", None, [("get_time", '{"city": "Ulm"}')], "tool_calls")
    assert GptOss(ANALYSIS + CALL, tokenizer_dir).message(tools=TOOLS) == called
    for tools in ({}, {"tools": TOOLS}):
        answered = ("I need it.", "It is seven.", [], "stop")
        assert GptOss(ANALYSIS + FINAL, tokenizer_dir).message(**tools) == answered
    model = GptOss(ANALYSIS + FINAL, tokenizer_dir)
    assert model.message(include_reasoning=False)[:2] == (None, "It is seven.")
    assert model.engine.params[-1].skip_special_tokens is False


def test_harmony_calls_are_read_without_a_reasoning_parser(tokenizer_dir: Path) -> None:
    model = GptOss(CALL, tokenizer_dir, reasoning_parser=None)
    assert model.message(tools=TOOLS) == (None, None, [("get_time", '{"city": "Ulm"}')], "tool_calls")


def test_the_final_message_in_harmony_follows_the_response_format(tokenizer_dir: Path) -> None:
    model = GptOss(ANALYSIS + "<|channel|>final<|message|>{}", tokenizer_dir)
    assert model.message(response_format={"type": "json_object"})[:2] == ("I need it.", "{}")
    asked = model.engine.params[-1].structured_outputs
    assert fits(asked, ANALYSIS + "<|channel|>final<|message|>{}", tokenizer_dir)
    assert not fits(asked, ANALYSIS + FINAL, tokenizer_dir)


@pytest.mark.parametrize("reasoning_parser", ["openai_gptoss", None])
def test_a_required_call_in_harmony_follows_the_schema(tokenizer_dir: Path, reasoning_parser: str | None) -> None:
    begun = HarmonyToolParser.prefill("get_time")
    text = ANALYSIS + CALL if reasoning_parser else CALL.removeprefix(begun)
    model = GptOss(text, tokenizer_dir, reasoning_parser)
    calls = model.message(tools=TOOLS, tool_choice="required")[2]
    assert calls == [("get_time", '{"city": "Ulm"}')]
    asked = model.engine.params[-1].structured_outputs
    assert fits(asked, text, tokenizer_dir)
    assert not fits(asked, text.replace("city", "town"), tokenizer_dir)
    if reasoning_parser:
        assert not fits(asked, text.replace("get_time", "get_rain"), tokenizer_dir)
