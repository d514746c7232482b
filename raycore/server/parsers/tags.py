"""Texts by which models mark thoughts and calls. Pure."""

from __future__ import annotations

from raycore.text.tokenizer import Tokenizer


def num_begun(text: str, mark: str) -> int:
    """Characters at the end of `text` that may begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def any_special(tokenizer: Tokenizer, *marks: str) -> bool:
    """Whether any of them is a special token, which is left out of the text unless that is asked for."""
    return not tokenizer.special_ids.isdisjoint(tokenizer.encode("".join(marks), add_special_tokens=False))
