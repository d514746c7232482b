"""Tags: the texts by which models mark reasoning and tool calls, such as `<think>`. Pure."""

from __future__ import annotations

from raycore.text.tokenizer import Tokenizer


def num_begun(text: str, tag: str) -> int:
    """How many of the tag's characters `text` ends with, if it ends with an incomplete beginning of the tag; else 0."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def any_special(tokenizer: Tokenizer, *tags: str) -> bool:
    """Whether any of the tags has a special token. By default, the text of outputs leaves special tokens out."""
    return not tokenizer.special_ids.isdisjoint(tokenizer.encode("".join(tags), add_special_tokens=False))
