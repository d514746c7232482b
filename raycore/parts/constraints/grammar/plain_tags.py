"""Makes tags such as Qwen's `<tool_call>` plain text for llguidance, unless the tokenizer declares them special.

llguidance treats any added token of the form `<…>` as special, and never uses special tokens for the text of a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import msgspec

_TAG = re.compile("<[!-~]*>")


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _AddedTokens(msgspec.Struct):
    """The part of a `tokenizer.json` that tells whether `with_plain_tags` changes anything."""

    added_tokens: list[_AddedToken] = []


def with_plain_tags(tokenizer_json: str, special_ids: Container[int]) -> str:
    """Return the tokenizer's JSON with its tags as tokens of the vocabulary instead of added tokens.

    Tags that the tokenizer declares special, and those in `special_ids`, stay added tokens. All tokens keep their ids.
    """
    added = msgspec.json.decode(tokenizer_json, type=_AddedTokens).added_tokens
    tags = {
        token.content
        for token in added
        if not token.special and token.id not in special_ids and _TAG.fullmatch(token.content)
    }
    if not tags:
        return tokenizer_json
    tokenizer: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    vocabulary: dict[str, int] | list[Any] = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):
        return tokenizer_json
    # with all added tokens, because those that stay added tokens get their ids from the vocabulary
    vocabulary |= {token.content: token.id for token in added}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in tags]
    return msgspec.json.encode(tokenizer).decode()


def special_tokens(tokenizer_json: str) -> dict[str, int]:
    """The ids of the tokens that llguidance treats as special, by their texts."""
    added = msgspec.json.decode(tokenizer_json, type=_AddedTokens).added_tokens
    return {token.content: token.id for token in added if token.special or _TAG.fullmatch(token.content)}
