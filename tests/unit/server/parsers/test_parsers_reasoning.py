"""Reasoning is separated from content however the text is split, and nothing is lost or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycore.errors import InvalidConfig
from raycore.server.parsers.reasoning import PARSERS, ReasoningPiece, parser_named

CALL = "<tool_call>"
BOTH = [name for name in PARSERS if name != "openai_gptoss"]
"""Those that split a message at one tag."""


def parse(name, pieces, is_reasoning=True, call=None):
    parser = PARSERS[name](is_reasoning, call)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    first_said = next((i for i, part in enumerate(parts) if part.content), len(parts))
    assert not any(part.reasoning for part in parts[first_said + 1 :]), "reasoning comes first"
    return ReasoningPiece("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("\n <think>\nHm.\n</think>\n\nYes.\n", "\nHm.\n", "\n\nYes.\n"),
        ("<think></think>Yes.", "", "Yes."),
        ("</think>", "", ""),
        ("", "", ""),
        ("\n ", "\n ", ""),
        ("never closed", "never closed", ""),
        ("<think>never closed</thin", "never closed</thin", ""),
        ("<thin", "<thin", ""),
        ("<think>Write <think> first.</think>Yes.", "Write <think> first.", "Yes."),
        ("a < b </ c </think>It ends with </think>.", "a < b </ c ", "It ends with </think>."),
        ("<</think>/</think>", "<", "/</think>"),
    ],
)
def test_a_message_is_parsed_to_reasoning_and_content(name, text, reasoning, content):
    assert parse(name, [text]) == (reasoning, content)
    assert parse(name, text) == (reasoning, content)


@pytest.mark.parametrize("name", BOTH)
def test_a_message_that_begins_after_its_reasoning_is_all_content(name):
    text = "<think>Yes.</think>"
    assert parse(name, [text], is_reasoning=False) == ("", text)


def test_a_tool_call_ends_the_reasoning_of_models_that_call_in_it():
    text = "I need it.<tool_call>\n{}</tool_call></think>"
    for name in ("qwen3", "glm45"):
        assert parse(name, text, call=CALL) == ("I need it.", "<tool_call>\n{}</tool_call></think>")
    calling = "I need it.<minimax:tool_call>\n"
    assert parse("minimax_m2", calling, call="<minimax:tool_call>") == ("I need it.", "<minimax:tool_call>\n")
    assert parse("qwen3", text) == ("I need it.<tool_call>\n{}</tool_call>", "")
    assert parse("deepseek_r1", text, call=CALL) == ("I need it.<tool_call>\n{}</tool_call>", "")
    assert parse("qwen3", "Hm.</think>Now <tool_call>", call=CALL) == ("Hm.", "Now <tool_call>")
    assert parse("qwen3", "Hm.<tool_cal", call=CALL) == ("Hm.<tool_cal", "")


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "<", "</", "think>", "<tool_", " ", "\n", "é", "x"]),
    max_size=8,
).map("".join)


@given(name=st.sampled_from(BOTH), text=TEXTS, is_reasoning=st.booleans(), data=st.data())
def test_reasoning_and_content_do_not_depend_on_how_the_text_is_split(name, text, is_reasoning, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, [text], is_reasoning, CALL)
    assert parse(name, pieces, is_reasoning, CALL) == whole
    assert text.endswith(whole.content)
    assert whole.reasoning in text


@given(text=TEXTS)
def test_the_content_begins_where_the_reasoning_ends(text):
    parser = PARSERS["qwen3"](True, CALL)
    content = parser.feed(text).content
    if parser.is_reasoning:
        parser.finish()
    assert parser.reasoning_length == len(text) - len(content)


def test_an_unknown_parser_is_refused_with_the_known_ones():
    with pytest.raises(InvalidConfig, match="reasoning_parser='granite' isn't one of deepseek_r1, qwen3"):
        parser_named("granite")
