"""Tags: the texts by which models mark reasoning and tool calls, such as `<think>`. Pure."""

from __future__ import annotations

from raycore.text.tokenizer import Tokenizer


def num_begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def any_special(tokenizer: Tokenizer, *tags: str) -> bool:
    """Whether a special token is part of a tag. The output's text leaves special tokens out by default."""
    return not tokenizer.special_ids.isdisjoint(tokenizer.encode("".join(tags), add_special_tokens=False))
