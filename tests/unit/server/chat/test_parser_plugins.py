"""A server answers with the calls that a parser for vLLM finds, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raycore.compat.vllm  # noqa: F401  # from here on, `vllm` is raycore's
from raycore import plugins

PLUGIN = """
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

@ToolParserManager.register_module("noting")
class Noting(ToolParser):
    def extract_tool_calls(self, model_output, request):
        call = FunctionCall(name="note", arguments='{"text": "noted"}')
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[ToolCall(function=call)], content=None)
"""
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}


def test_calls_of_a_plugin(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = plugins._process._replace(registered={}, files=set())  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(plugins, "_process", process)
    path = tmp_path / "noting.py"
    path.write_text(PLUGIN)
    client = serve(tool_parser_plugin=str(path), tool_call_parser="noting")
    body = {"messages": [{"role": "user", "content": "27 + 58 ="}], "tools": [TOOL]}
    answer = client.post("/v1/chat/completions", body).json
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "note", "arguments": '{"text": "noted"}'}
    required = client.post("/v1/chat/completions", body | {"tool_choice": "required"})
    assert required.status == 400
    assert "only reads calls" in required.json["error"]["message"]
