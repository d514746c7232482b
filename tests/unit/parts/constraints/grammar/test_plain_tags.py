"""Which added tokens become text for llguidance, and that no token changes its id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from raycore.demo import demo_model_path
from raycore.parts.constraints.grammar.plain_tags import with_plain_tags

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
ADDED = [
    ("<|new|>", True),
    ("<tool_call>", False),
    ("<special>", True),
    ("</tool_call>", False),
    ("<|fim|>", False),
    ("wörd x", False),
    ("</end>", False),
    ("<two words>", False),
]


@pytest.fixture
def text() -> str:
    tokenizer = json.loads((Path(demo_model_path()) / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {"id": 320 + i, "content": content, "special": special, **FLAGS} for i, (content, special) in enumerate(ADDED)
    ]
    return json.dumps(tokenizer)


def test_added_tags_that_are_not_special_become_vocabulary(text):
    before, after = (json.loads(each) for each in (text, with_plain_tags(text, {326})))
    gone = {token["content"] for token in before["added_tokens"] if token not in after["added_tokens"]}
    assert gone == {"<tool_call>", "</tool_call>", "<|fim|>"}
    assert gone <= after["model"]["vocab"].keys()
    untouched = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    assert [before[name] for name in untouched] == [after[name] for name in untouched]


def test_turning_tags_into_vocabulary_changes_no_token_id(text):
    before, after = Tokenizer.from_str(text), Tokenizer.from_str(with_plain_tags(text, set()))
    assert after.get_vocab(with_added_tokens=True) == before.get_vocab(with_added_tokens=True)
    for sample in ("27 + 58 = 85", "<|new|>é<special>wörd x"):
        assert after.encode(sample).ids == before.encode(sample).ids


def test_a_tokenizer_without_plain_tags_is_unchanged():
    text = (Path(demo_model_path()) / "tokenizer.json").read_text()
    assert with_plain_tags(text, set()) is text
