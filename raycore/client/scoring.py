"""Scores of pairs of texts: which pairs, the prompts that a model with a head for scores gets, and cosines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from raycore.checkpoint.json_fields import shortened
from raycore.client.inputs import ParsedPrompt, parse_prompts
from raycore.errors import InvalidRequest
from raycore.models.pooling import PoolingSpec
from raycore.text.tokenizer import Tokenizer


def paired(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return two lists of texts of the same length: one text with each of several, or several with as many.

    Raises:
        InvalidRequest: an argument has no text, or the numbers don't fit.
    """
    first, second = _texts("text_1", text_1), _texts("text_2", text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"{len(first)} texts can't be paired with {len(second)}: give one and any number, or as many of each"
        )
    return first, second


def pair_prompts(
    pairs: Sequence[tuple[str, str]],
    pooling: PoolingSpec,
    tokenizer: Tokenizer,
    max_tokens: int | None = None,
    chat_template: str | None = None,
) -> list[ParsedPrompt]:
    """Return the prompts of pairs of texts for a model with a head for scores.

    Args:
        max_tokens: the ends of longer texts are cut off. None: none are.
        chat_template: renders a pair as two messages, with the roles `query` and `document`. None: the tokenizer joins
            the texts, or they follow each other, as the model wants it.
    """
    if chat_template is not None:
        rendered = [_render(pair, tokenizer, chat_template) for pair in pairs]
        return parse_prompts(rendered, tokenizer, add_special_tokens=False, max_tokens=max_tokens)
    if pooling.pairs == "text":
        return parse_prompts([first + second for first, second in pairs], tokenizer, max_tokens=max_tokens)
    return [ParsedPrompt(None, ids) for ids in tokenizer.encode_truncated(list(pairs), max_tokens)]


def cosines(first: NDArray[np.float32], second: NDArray[np.float32]) -> list[float]:
    """Return the cosine similarity of each row of two matrices, float32[N, size]. It is 0 where a row is all zeros."""
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products: NDArray[np.float32] = (first * second).sum(1) / np.maximum(norms, np.finfo(np.float32).tiny)
    return products.tolist()


def _texts(name: str, given: object) -> list[str]:
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, Sequence) or not items:
        raise InvalidRequest(f"{name}={shortened(given)} isn't a text or a list of texts")
    for item in cast("Sequence[Any]", items):
        if not isinstance(item, str) or not item:
            raise InvalidRequest(f"{name} has {shortened(item)}, which isn't a text, or is empty")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} has a text with half of a surrogate pair") from None
    return list(cast("Sequence[str]", items))


def _render(pair: tuple[str, str], tokenizer: Tokenizer, chat_template: str) -> str:
    messages = [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=False, chat_template=chat_template)  # pyright: ignore[reportArgumentType]
