"""Reads and writes messages with tool calls in all formats, as models do and as raycore's parsers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tool_templates

from raycore.server.parsers.tool_calls import CallArguments, CallStart, Content, ToolParser, parser_named
from raycore.text.chat_template import render

TEMPLATES = {
    "hermes": tool_templates.HERMES,
    "llama3_json": tool_templates.LLAMA3,
    "qwen3_coder": tool_templates.QWEN3_CODER,
    "mistral, older": tool_templates.MISTRAL_LIST,
    "mistral, newer": tool_templates.MISTRAL,
    "glm45": tool_templates.GLM45,
    "glm47": tool_templates.GLM47,
    "minimax_m2": tool_templates.MINIMAX_M2,
    "pythonic": tool_templates.PYTHONIC,
}
"""By the format: the parser's name, and what distinguishes the forms that it reads."""


_MARK = "here"


class Read(NamedTuple):
    """What a parser has read."""

    content: str
    calls: list[tuple[str, str]]
    """Names and arguments."""


def parser_of(form: str) -> type[ToolParser]:
    return parser_named(form.partition(",")[0])


def written(form: str, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """How the chat template of this format writes calls. `calls`: their names and arguments."""
    asked = {"role": "user", "content": "?"}
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    tools = [{"id": f"call{i:05}", "type": "function", "function": each} for i, each in enumerate(functions)]
    answer = {"role": "assistant", "content": _MARK}
    without, text = (
        _rendered(form, [asked, {**answer, "tool_calls": some}]).partition(_MARK)[2] for some in ([], tools)
    )
    return text.removesuffix(without)


def _rendered(form: str, messages: list[dict[str, Any]]) -> str:
    options: dict[str, Any] = {"special_tokens": {}, "variables": {"tools": []}}
    return render(TEMPLATES[form], messages, add_generation_prompt=False, continue_final_message=False, **options)


def read(parser: ToolParser, pieces: Iterable[str], *, is_cut_off: bool = False) -> Read:
    """What the parser reads in these pieces of a message."""
    fed = list(pieces)
    deltas = [delta for piece in fed for delta in parser.feed(piece)] + parser.finish(is_cut_off)
    check_places("".join(fed), deltas)
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return Read("".join(delta.text for delta in deltas if isinstance(delta, Content)), calls)


def check_places(text: str, parts: Sequence[object], least: int = 0) -> None:
    """Check that the content stands in the text where it says, and in this order, from the character `least` on."""
    for part in parts:
        if isinstance(part, Content) and part.start is not None:
            assert part.start >= least
            least = part.start + len(part.text)
            assert text[part.start : least] == part.text
        elif isinstance(part, Content):
            assert part.text == "\n", "only what is put between two messages isn't the model's"


def pieces_of(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]
