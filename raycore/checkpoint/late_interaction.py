"""Reads the files that models of late interaction have: PyLate's, and those of Stanford's ColBERT. Without torch."""

from __future__ import annotations

__all__ = ["read_late_interaction"]

import string
from collections.abc import Callable
from pathlib import Path

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.parts.pooling.models.late_interaction import LateInteraction

_PYLATE_FILE = "config_sentence_transformers.json"
_STANFORD_FILE = "artifact.metadata"

TokenId = Callable[[str], int | None]
MaskToken = Callable[[], str | None]
_MASKS = ("[MASK]", "<mask>")
"""The usual names."""


def read_late_interaction(
    path: Path, read_tokenizer: Callable[[], TokenId], mask_token: MaskToken
) -> LateInteraction | None:
    """Return what the checkpoint in the directory `path` wants of queries and documents. None: it isn't one of late
    interaction.

    Args:
        read_tokenizer: returns what finds the id of a token, or None if the tokenizer has no such token. Called for
            checkpoints of late interaction only.
        mask_token: returns what the tokenizer's files name as its mask token, or None if they name none.

    Raises:
        InvalidCheckpoint: a file is damaged, or a token isn't the tokenizer's.
    """
    file = path / _PYLATE_FILE
    if file.is_file():
        fields = JsonFields.read(file)
        if fields.get("model_type") == "ColBERT" or fields.get("query_prefix") is not None:
            return _pylate(fields, read_tokenizer(), mask_token)
    file = path / _STANFORD_FILE
    return _stanford(JsonFields.read(file), read_tokenizer(), mask_token) if file.is_file() else None


def _pylate(fields: JsonFields, token_id: TokenId, mask_token: MaskToken) -> LateInteraction:
    """Source: `ColBERT` in pylate/models/colbert.py, whose defaults these are."""
    fields = fields.with_defaults(
        {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32, "document_length": 180}
    )
    skipped = fields.list_("skiplist_words")
    words = list(string.punctuation) if skipped is None else [str(word) for word in skipped]
    expands = fields.bool_("do_query_expansion", default=True)
    return LateInteraction(
        _token(fields, "query_prefix", token_id),
        _token(fields, "document_prefix", token_id),
        fields.int_("query_length", low=3),
        fields.int_("document_length", low=3),
        _mask(fields, token_id, mask_token, ", or set do_query_expansion to false") if expands else None,
        fields.bool_("attend_to_expansion_tokens"),
        _known(words, token_id),
    )


def _stanford(fields: JsonFields, token_id: TokenId, mask_token: MaskToken) -> LateInteraction:
    """Source: `ColBERTConfig` in colbert/infra/config/settings.py, whose defaults these are."""
    fields = fields.with_defaults(
        {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 32, "doc_maxlen": 220, "dim": 128}
    )
    return LateInteraction(
        _token(fields, "query_token_id", token_id),
        _token(fields, "doc_token_id", token_id),
        fields.int_("query_maxlen", low=3),
        fields.int_("doc_maxlen", low=3),
        _mask(fields, token_id, mask_token),
        fields.bool_("attend_to_mask_tokens"),
        _known(list(string.punctuation), token_id) if fields.bool_("mask_punctuation", default=True) else [],
        fields.int_("dim"),
    )


def _token(fields: JsonFields, key: str, token_id: TokenId) -> int:
    name = str(fields.get(key))
    found = next((each for each in (token_id(name), token_id(name.strip())) if each is not None), None)
    if found is None:
        raise fields.error(key, "a token of the checkpoint's tokenizer")
    return found


def _mask(fields: JsonFields, token_id: TokenId, mask_token: MaskToken, otherwise: str = "") -> int:
    named = mask_token()
    names = _MASKS if named is None else (named, *_MASKS)
    found = next((each for each in map(token_id, names) if each is not None), None)
    if found is None:
        raise InvalidCheckpoint(
            f"{fields.source}: queries are filled up with masks, and the tokenizer has none of {', '.join(names)}: "
            f"name its mask_token in tokenizer_config.json{otherwise}"
        )
    return found


def _known(words: list[str], token_id: TokenId) -> list[int]:
    return sorted({each for each in map(token_id, words) if each is not None})
