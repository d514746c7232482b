"""Files of parsers for vLLM, and for raycore, are imported, and their parsers are found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raycore.compat.vllm  # noqa: F401  # from here on, `vllm` is raycore's
from raycore import plugins
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.server.chat.call_format import find_parser
from raycore.server.options import ServerOptions, server_options
from raycore.server.parsers import reasoning
from raycore.server.parsers.tool_calls import CallArguments, CallStart, Content

TOOLS = """
import json
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

@ToolParserManager.register_module(["mine", "mine_too"])
class Mine(ToolParser):
    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        self.end, self.number = "<|im_end|>", self.vocab["<|im_end|>"]

    def extract_tool_calls(self, model_output, request):
        text, mark, call = model_output.partition("CALL ")
        if not mark:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        name = request.tools[0].function.name
        calls = [ToolCall(type="function", function=FunctionCall(name=name, arguments=json.dumps({"x": call})))]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=text)
"""
REASONING = """
from vllm.reasoning.abs_reasoning_parsers import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

@ReasoningParserManager.register_module("ponder")
class Ponder(BaseThinkingReasoningParser):
    @property
    def start_token(self):
        return "<ponder>"

    @property
    def end_token(self):
        return "</ponder>"
"""
OWN = """
from raycore.plugins import TOOL_PARSERS, register_plugin
from raycore.server.parsers.tool_calls.json_calls import HermesParser

class Own(HermesParser):
    pass

register_plugin(TOOL_PARSERS, "own", Own)
"""


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    process = plugins._process._replace(registered={}, files=set())  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(plugins, "_process", process)


@pytest.fixture
def options(tmp_path: Path) -> Any:
    def make(text: str, **given: Any) -> ServerOptions:
        path = tmp_path / f"plugin_{len(text)}.py"
        path.write_text(text)
        name = "reasoning_parser_plugin" if "reasoning_parser" in given else "tool_parser_plugin"
        return server_options("m", {name: str(path), **given})

    return make


def test_a_tool_parser_for_vllm_reads_whole_messages(options: Any, tokenizer: Any) -> None:
    made = options(TOOLS, tool_call_parser="mine_too")
    parser = find_parser(tokenizer, None, made.tool_call_parser)
    assert parser.tags() == ("<|im_end|>",)
    reader = parser({"add": {"type": "object"}})
    assert reader.feed("So: CA") + reader.feed("LL 3") == []
    assert reader.finish() == [Content("So: "), CallStart(0, "add"), CallArguments(0, '{"x": "3"}')]
    other = parser({})
    other.feed("no")
    assert other.finish() == [Content("no")]
    with pytest.raises(InvalidRequest, match="tool_choice can't require a call: the tool parser Mine only reads calls"):
        parser.prefill("add")


@pytest.mark.parametrize(
    ("output", "content", "start"),
    [
        ('<call>{"a": "ok"}</call>ok', "ok", None),
        ('ok<call>{"a": "ok"}</call>', "ok", 0),
        ("<call>{}</call>ok", "ok", 15),
        ("<call>{}</call>aaa", "aa", None),
        (" ok <call>{}</call>", "ok then", None),
    ],
)
def test_content_has_a_place_only_if_there_is_no_other_place(
    options: Any, tokenizer: Any, output: str, content: str, start: int | None
) -> None:
    text = TOOLS.replace("content=model_output", f"content={content!r}")
    parser = find_parser(tokenizer, None, options(text, tool_call_parser="mine").tool_call_parser)
    reader = parser({})
    reader.feed(output)
    (delta,) = reader.finish()
    assert isinstance(delta, Content)
    assert (delta.text, delta.start) == (content, start)


def test_reasoning_parsers_for_vllm_say_their_tags(options: Any) -> None:
    parser = reasoning.parser_named(options(REASONING, reasoning_parser="ponder").reasoning_parser)
    reader = parser()
    assert reader.feed("<ponder>so</ponder>yes") == ("so", "yes")


def test_a_file_may_register_raycores_own_classes(options: Any, tokenizer: Any) -> None:
    options(OWN, tool_call_parser="own")
    assert find_parser(tokenizer, None, "own").__name__ == "Own"


def test_what_cannot_be_used_is_named(options: Any) -> None:
    with pytest.raises(InvalidConfig, match="tool_call_parser='other' is not supported"):
        options(TOOLS, tool_call_parser="other")
    with pytest.raises(InvalidConfig, match="tool_parser_plugin='nowhere' can't be imported: ModuleNotFoundError"):
        server_options("m", {"tool_parser_plugin": "nowhere"})
    text = "from vllm.reasoning import ReasoningParserManager as M\nM.register_module('a', module=int)"
    with pytest.raises(InvalidConfig, match="the reasoning parser int isn't a BaseThinkingReasoningParser"):
        options(text, reasoning_parser="a")
