"""Reads the files that models of late interaction have: PyLate's, and those of Stanford's ColBERT. Without torch."""

from __future__ import annotations

__all__ = ["read_late_interaction"]

import string
from collections.abc import Callable
from pathlib import Path

from raycore.json_fields import JsonFields
from raycore.parts.pooling.models.late_interaction import LateInteraction

_PYLATE_FILE = "config_sentence_transformers.json"
_STANFORD_FILE = "artifact.metadata"

TokenId = Callable[[str], int | None]


def read_late_interaction(path: Path, read_tokenizer: Callable[[], TokenId]) -> LateInteraction | None:
    """Return what the checkpoint in the directory `path` wants of queries and documents. None: it isn't one of late
    interaction.

    Args:
        read_tokenizer: returns what finds the id of a token, or None if the tokenizer has no such token. Called for
            checkpoints of late interaction only.

    Raises:
        InvalidCheckpoint: a file is damaged, or a token isn't the tokenizer's.
    """
    file = path / _PYLATE_FILE
    if file.is_file():
        fields = JsonFields.read(file)
        if fields.get("model_type") == "ColBERT" or fields.get("query_prefix") is not None:
            return _pylate(fields, read_tokenizer())
    file = path / _STANFORD_FILE
    return _stanford(JsonFields.read(file), read_tokenizer()) if file.is_file() else None


def _pylate(fields: JsonFields, token_id: TokenId) -> LateInteraction:
    """Source: `ColBERT` in pylate/models/colbert.py, whose defaults these are."""
    fields = fields.with_defaults(
        {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 32, "document_length": 180}
    )
    skipped = fields.list_("skiplist_words")
    words = list(string.punctuation) if skipped is None else [str(word) for word in skipped]
    return LateInteraction(
        _token(fields, "query_prefix", token_id),
        _token(fields, "document_prefix", token_id),
        fields.int_("query_length", low=3),
        fields.int_("document_length", low=3),
        _mask(fields, token_id) if fields.bool_("do_query_expansion", default=True) else None,
        fields.bool_("attend_to_expansion_tokens"),
        _known(words, token_id),
    )


def _stanford(fields: JsonFields, token_id: TokenId) -> LateInteraction:
    """Source: `ColBERTConfig` in colbert/infra/config/settings.py, whose defaults these are."""
    fields = fields.with_defaults(
        {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 32, "doc_maxlen": 220, "dim": 128}
    )
    return LateInteraction(
        _token(fields, "query_token_id", token_id),
        _token(fields, "doc_token_id", token_id),
        fields.int_("query_maxlen", low=3),
        fields.int_("doc_maxlen", low=3),
        _mask(fields, token_id),
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


def _mask(fields: JsonFields, token_id: TokenId) -> int:
    found = next((each for each in map(token_id, ("[MASK]", "<mask>")) if each is not None), None)
    if found is None:
        raise fields.error("do_query_expansion", "false, because the tokenizer has neither [MASK] nor <mask>")
    return found


def _known(words: list[str], token_id: TokenId) -> list[int]:
    return sorted({each for each in map(token_id, words) if each is not None})
