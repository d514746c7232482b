"""Which characters of an output are content doesn't depend on how the output is cut, with every pair of parsers."""

from __future__ import annotations

from itertools import pairwise, zip_longest

import pytest
from call_formats import check_places
from hypothesis import given
from hypothesis import strategies as st

from raycore.server.chat.choice_reader import ChoiceReader
from raycore.server.chat.parts import Part
from raycore.server.chat.reasoning import Reasoning
from raycore.server.chat.tools import MessageReader, ToolUse
from raycore.server.parsers import reasoning
from raycore.server.parsers.tool_calls import PARSERS, Content

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FINAL = "<|channel|>final<|message|>"
HARMONY_TAGS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
HARMONY = ["assistant", "analysis", "final", "commentary", " to=functions.f ", "<|", "|>"]
OTHERS = ["<think>", "</think>", "</thi", "<tool_", "call>", "</tool_call>", "to", "\n", " ", "é", "{", "}", CALL]
TEXTS = st.lists(st.sampled_from([*HARMONY_TAGS, *HARMONY, *OTHERS]), max_size=12).map("".join)


def reader(thinks: str | None, calls: str | None) -> ChoiceReader:
    tools = None if calls is None else ToolUse(PARSERS[calls], {"f": {}}, None, False, False, frozenset())
    parser = None if thinks is None else reasoning.parser_named(thinks)
    thinking = None if parser is None else Reasoning(parser, True, None if tools is None else tools.parser.opening)
    return ChoiceReader(thinking, None if tools is None else MessageReader(tools, is_prefilled=False))


def contents(read: ChoiceReader, pieces: list[str]) -> tuple[str, set[int]]:
    """The content, and the numbers of its characters in the text."""
    parts: list[Part] = [part for piece in pieces for part in read.read(piece, None, None)]
    parts += read.read("", "stop", None)
    check_places("".join(pieces), parts)
    found = [part for part in parts if isinstance(part, Content)]
    places = [range(part.start, part.start + len(part.text)) for part in found if part.start is not None]
    return "".join(part.text for part in found), {each for place in places for each in place}


@given(
    thinks=st.sampled_from([None, *reasoning.PARSERS]),
    calls=st.sampled_from([None, *PARSERS]),
    text=TEXTS,
    data=st.data(),
)
def test_any_cut_of_an_output_leaves_the_content_where_it_is(
    thinks: str | None, calls: str | None, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    assert contents(reader(thinks, calls), pieces) == contents(reader(thinks, calls), [text])


@pytest.mark.parametrize(
    ("thinks", "calls", "others", "content"),
    [
        ("qwen3", "hermes", ["<think>to</think>", CALL, ""], ["to", "\nto"]),
        (None, "llama3_json", ['{"name": "f", "parameters": {"to": 1}};', ""], [" to"]),
        ("openai_gptoss", None, [FINAL, f"<|end|><|start|>assistant{FINAL}", ""], ["to", "go"]),
        ("openai_gptoss", "openai", [FINAL, f"<|end|><|start|>assistant{FINAL}", ""], ["to", "go"]),
    ],
)
def test_content_is_found_where_it_stands_and_not_where_the_same_text_stands(
    thinks: str | None, calls: str | None, others: list[str], content: list[str]
) -> None:
    text, expected = "", set[int]()
    for other, piece in zip_longest(others, content, fillvalue=""):
        text += other + piece
        expected |= set(range(len(text) - len(piece), len(text)))
    assert contents(reader(thinks, calls), [text])[1] == expected


def test_what_a_required_call_begins_with_in_the_prompt_is_not_counted() -> None:
    use = ToolUse(PARSERS["hermes"], {"f": {}, "g": {}}, None, True, False, frozenset())
    text = 'f", "arguments": {}}\n</tool_call>\nDone.'
    parts = ChoiceReader(None, MessageReader(use, is_prefilled=True)).read(text, "stop", None)
    check_places(text, parts)
    assert [part.text for part in parts if isinstance(part, Content)] == ["\nDone."]
