"""Messages of gpt-oss are split into reasoning, content and calls, however their text arrives."""

from __future__ import annotations

import json

import pytest
from call_formats import Read, pieces_of, read
from hypothesis import given
from hypothesis import strategies as st

from raycore.server.parsers.reasoning import HarmonyParser, ReasoningPiece
from raycore.server.parsers.tool_calls.harmony import HarmonyToolParser

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"


def split(text: str, size: int = 10_000, *, has_tools: bool = False, is_reasoning: bool = True) -> ReasoningPiece:
    parser = HarmonyParser(is_reasoning, HarmonyToolParser.opening if has_tools else None)
    parts = [*(parser.feed(piece) for piece in pieces_of(text, size)), parser.finish()]
    return ReasoningPiece("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


def message(text: str, size: int = 10_000) -> tuple[str, Read]:
    """The reasoning, and what the tool parser reads in the rest."""
    reasoning, rest = split(text, size, has_tools=True)
    return reasoning, read(HarmonyToolParser({"f": {}}), pieces_of(rest, size))


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", "Hm.", "Yes."),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", "Hm.", "Yes."),
        (f"{ANALYSIS}a < b <|x|><|end|>{FINAL}\n<|Yes|\n", "a < b <|x|>", "\n<|Yes|\n"),
        ("<|channel|>final<|message|>Yes.", "", "Yes."),
        (f"{ANALYSIS}never closed<|en", "never closed<|en", ""),
        (f"{ANALYSIS}Hm.{FINAL}The end was missing.", "Hm.", "The end was missing."),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant{ANALYSIS}Hm again.<|end|>{FINAL}Yes.", "Hm.\nHm again.", "Yes."),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant{PREAMBLE}I look.<|end|>{FINAL}Yes.", "Hm.", "I look.\nYes."),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>fin", "Hm.", ""),
        ("No tag at all.", "", "No tag at all."),
        ("", "", ""),
    ],
)
def test_a_harmony_message_is_parsed_to_reasoning_and_content(
    text: str, size: int, reasoning: str, content: str
) -> None:
    assert split(text, size) == (reasoning, content)
    assert message(text, size) == (reasoning, Read(content, []))


def test_a_continued_harmony_message_is_content() -> None:
    assert split(" and so on.<|return|>", is_reasoning=False) == ("", " and so on.")


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(
    "header",
    [
        TO_F,
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
    ],
)
def test_harmony_calls_are_parsed_under_every_header(header: str, size: int) -> None:
    arguments = json.dumps({"city": "<|not a tag|> Köln", "days": [1, 2]}, ensure_ascii=False)
    for ending in ("", "<|call|>"):
        alone = message(f"{header}{arguments}{ending}", size)
        assert alone == ("", Read("", [("f", arguments)]))
        text = f"{ANALYSIS}Hm.<|end|><|start|>assistant{PREAMBLE}I look.<|end|><|start|>assistant{header}{arguments}"
        assert message(text + ending, size) == ("Hm.", Read("I look.", [("f", arguments)]))


def test_several_harmony_calls_are_parsed_and_built_in_tools_are_content() -> None:
    text = f"{TO_F}{{}}<|call|><|start|>assistant{TO_F.replace('functions.f', 'functions.g')}[1<|call|>"
    assert message(text) == ("", Read("", [("f", "{}"), ("g", "[1")]))
    # a built-in tool, which isn't the request's
    assert message(f"{TO_F.replace('functions.f', 'python')}x = 1<|call|>") == ("", Read("x = 1", []))


def test_arguments_of_harmony_calls_are_parsed_piece_by_piece() -> None:
    parser = HarmonyToolParser({"f": {}})
    assert parser.feed("<|channel|>commentary to=functions.f <|constrain|>json") == []
    assert len(parser.feed("<|message|>")) == 1
    assert [delta.text for delta in parser.feed('{"a"')] == ['{"a"']
    assert [delta.text for delta in parser.feed(": 1}<|call")] == [": 1}"]
    assert parser.feed("|>") == parser.finish() == []


def test_a_harmony_call_that_the_prompt_began_is_parsed() -> None:
    parser = HarmonyToolParser({"f": {}})
    begun = parser.begin("f")
    assert [*begun, *parser.feed("{}<|call|>")] == [*HarmonyToolParser({}).feed(HarmonyToolParser.prefill("f") + "{}")]
    named = read(HarmonyToolParser({"f": {}}), [HarmonyToolParser.prefill(None), "f <|constrain|>json<|message|>{}"])
    assert named == Read("", [("f", "{}")])


TAGS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
OTHERS = ["assistant", "analysis", "final", "commentary", " to=functions.f ", "<|", "|>", "\n", " ", "é", "{}"]
TEXTS = st.lists(st.sampled_from(TAGS + OTHERS), max_size=10).map("".join)


@given(text=TEXTS, has_tools=st.booleans(), data=st.data())
def test_any_split_of_a_harmony_text_gives_the_same_message(text: str, has_tools: bool, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    assert split(text, size, has_tools=has_tools) == split(text, has_tools=has_tools)
    assert message(text, size) == message(text)


def test_reasoning_length_is_that_of_the_text_before_the_next_message() -> None:
    parser = HarmonyParser()
    parser.feed(ANALYSIS + "Hm.")
    assert (parser.is_reasoning, parser.reasoning_length) == (True, len(ANALYSIS) + 3)
    parser.feed(f"<|end|>{FINAL}")
    assert (parser.is_reasoning, parser.reasoning_length) == (False, len(ANALYSIS) + len("Hm.<|end|>"))
    parser.feed(f"Yes.<|end|><|start|>assistant{ANALYSIS}Hm again.")
    assert parser.reasoning_length == len(ANALYSIS) + len("Hm.<|end|>")
