"""Finds out in which format a model writes tool calls: that in which its chat template renders them."""

from __future__ import annotations

import functools
from typing import Any

from raycore.errors import InvalidRequest
from raycore.server.http.errors import APIError
from raycore.server.parsers.tool_calls import PARSERS, CallStart, ToolParser, parser_named
from raycore.text.tokenizer import Tokenizer


def find_parser(tokenizer: Tokenizer, chat_template: str | None, asked: str | None) -> type[ToolParser]:
    """The parser for the calls that a model writes.

    Args:
        chat_template: None: the checkpoint's.
        asked: the parser's name; None: the parser that reads the calls that the chat template renders, or that of the
            most common format if it renders no tools.

    Raises:
        APIError: the chat template renders calls that no parser reads.
    """
    shows_tools, calls = _inspect_template(tokenizer, chat_template)
    if asked is None and not shows_tools:
        asked = _COMMON
    parser = _reader_of(calls) if asked is None else parser_named(asked)
    if parser is None:
        raise APIError(
            400,
            "tools: the format of the model's tool calls couldn't be recognized from its chat template; start the "
            f"server with --tool-call-parser ({', '.join(PARSERS)}), or send tool_choice='none'",
            param="tools",
        )
    return parser.as_written(calls).for_tokenizer(tokenizer)


_COMMON = "hermes"
"""The parser for a model whose template doesn't render tools: a required call needs a format, and any will do."""

_PROBE = "raycore_probe"
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
_PROBE_ASKED = {"role": "user", "content": "Probe."}
_PROBE_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _PROBE, "arguments": {"key": "value"}}}
    ],
}


@functools.lru_cache(maxsize=8)
def _inspect_template(tokenizer: Tokenizer, chat_template: str | None) -> tuple[bool, str]:
    """Whether a chat template renders tools, and how it renders a call. Empty if it can't render calls."""
    asked = _try_rendering(tokenizer, chat_template, [_PROBE_ASKED], add_generation_prompt=True)
    if asked is None or _PROBE not in asked:
        return False, ""
    called = _try_rendering(tokenizer, chat_template, [_PROBE_ASKED, _PROBE_CALL], add_generation_prompt=False)
    return True, (called or "").removeprefix(asked)


@functools.lru_cache(maxsize=8)
def _reader_of(calls: str) -> type[ToolParser] | None:
    for parser in PARSERS.values():
        reader = parser({})
        deltas = [*reader.feed(calls), *reader.finish()]
        if any(isinstance(delta, CallStart) and delta.name == _PROBE for delta in deltas):
            return parser
    return None


def _try_rendering(
    tokenizer: Tokenizer, chat_template: str | None, messages: list[dict[str, Any]], *, add_generation_prompt: bool
) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, chat_template=chat_template, tools=[_PROBE_TOOL]
        )
    except InvalidRequest:
        return None
