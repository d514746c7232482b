"""raycore reads in Harmony what OpenAI's own package reads.

Skipped unless the package is installed, and the variable TIKTOKEN_ENCODINGS_BASE names a directory with its vocabulary,
`o200k_base.tiktoken`. Without that, the package asks the network.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from call_formats import Read, read
from hypothesis import given
from hypothesis import strategies as st

from raycore.server.parsers.reasoning import HarmonyParser
from raycore.server.parsers.tool_calls.harmony import HarmonyToolParser

openai_harmony = pytest.importorskip("openai_harmony")
if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
    pytest.skip("TIKTOKEN_ENCODINGS_BASE names no directory with o200k_base.tiktoken", allow_module_level=True)

BODIES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
HEADERS = st.sampled_from(
    [
        "<|channel|>analysis",
        "<|channel|>commentary",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=python",
        " to=functions.get_it<|channel|>commentary <|constrain|>json",
        " to=functions.get_it<|channel|>analysis code",
    ]
)
MESSAGES = st.lists(st.tuples(HEADERS, BODIES), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def encoding() -> Any:
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def expected(encoding: Any, text: str) -> tuple[str, Read]:
    """The reasoning, and the content and calls."""
    token_ids = encoding.encode(text, allowed_special="all")
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, str]] = []
    for message in encoding.parse_messages_from_completion_tokens(token_ids, openai_harmony.Role.ASSISTANT):
        body = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient.startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), body))
        elif message.channel == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return "\n".join(reasoning), Read("\n".join(content), calls)


@given(messages=MESSAGES)
def test_harmony_messages_are_parsed_as_by_openais_library(encoding: Any, messages: list[tuple[str, str]]) -> None:
    ends = ["<|call|>" if "functions." in header else "<|end|>" for header, _ in messages]
    written = [f"{header}<|message|>{body}{end}" for (header, body), end in zip(messages, ends, strict=True)]
    text = "<|start|>assistant".join(written)
    parser = HarmonyParser(call=HarmonyToolParser.opening)
    parts = [parser.feed(text), parser.finish()]
    found = read(HarmonyToolParser({}), [part.content for part in parts])
    assert ("".join(part.reasoning for part in parts), found) == expected(encoding, text)
