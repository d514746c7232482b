"""Scores of pairs of texts, such as a question and a document: prompts of both, or similarities of embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.text.cuts import Side
from raycore.text.tokenizer import Tokenizer

Pair = tuple[str, str]

_OWN_VARIABLES = ("chat_template", "messages", "tools", "add_generation_prompt", "continue_final_message")
_BATCH_CHARACTERS = 1_000_000
"""So many characters of joined texts, and one text more, are encoded at once: enough for all cores."""


@dataclass(frozen=True)
class PairFormat:
    """How two texts become one prompt. The options have vLLM's names."""

    use_sep_token: bool = True
    """Without a template: whether the tokenizer joins the texts, as encoders that compare texts need. False: the second
    text follows the first one, as for decoders."""
    chat_template: str | None = None
    """Jinja text. It gets two messages, with the roles `query` and `document`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The template's own variables, such as `instruction`."""
    max_tokens_per_query: int | None = None
    """The first text is cut to so many tokens."""
    max_tokens_per_doc: int | None = None
    """The second text is cut to so many tokens."""
    truncate_prompt_tokens: int | None = None
    """The whole prompt is cut to so many tokens."""
    truncation_side: Side | None = None
    """Where a prompt is cut. None: as the tokenizer says."""


def pair_prompts(tokenizer: Tokenizer, pairs: Sequence[Pair], pair_format: PairFormat) -> Iterator[dict[str, Any]]:
    """The prompts of pairs of texts: each has `prompt_token_ids`, and `token_type_ids` if those aren't all 0.

    They are made while they are asked for: a long text may be in many pairs, and the caller may refuse the first one.

    Raises:
        InvalidRequest: the template refuses the texts, or one of its variables has a name that is taken.
    """
    if pair_format.chat_template is None and pair_format.use_sep_token:
        joined = tokenizer.encode_pairs(
            pairs,
            pair_format.truncate_prompt_tokens,
            pair_format.truncation_side,
            (pair_format.max_tokens_per_query, pair_format.max_tokens_per_doc),
        )
        yield from (_prompt(pair.token_ids, pair.type_ids) for pair in joined)
        return
    most, side = pair_format.truncate_prompt_tokens, pair_format.truncation_side
    for texts in _batches(_texts(tokenizer, pairs, pair_format)):
        encoded = tokenizer.encode_batch(texts) if most is None else tokenizer.encode_within(texts, most, side=side)
        yield from (_prompt(token_ids, []) for token_ids in encoded)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """The texts in lists that each end with the text that brings them to `_BATCH_CHARACTERS`."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _prompt(token_ids: list[int], type_ids: Sequence[int]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    return prompt | {"token_type_ids": list(type_ids)} if any(type_ids) else prompt


def _texts(tokenizer: Tokenizer, pairs: Sequence[Pair], pair_format: PairFormat) -> Iterator[str]:
    """The text of each pair. A text that is the same in many pairs is cut once."""
    taken = next((name for name in _OWN_VARIABLES if name in pair_format.chat_template_kwargs), None)
    if pair_format.chat_template is not None and taken is not None:
        raise InvalidRequest(f"chat_template_kwargs has {taken!r}, which is set for the template already")
    queries = _cut(tokenizer, (query for query, _ in pairs), pair_format.max_tokens_per_query)
    documents = _cut(tokenizer, (document for _, document in pairs), pair_format.max_tokens_per_doc)
    for query, document in pairs:
        yield _joined(tokenizer, queries[query], documents[document], pair_format)


def _cut(tokenizer: Tokenizer, texts: Iterable[str], most: int | None) -> dict[str, str]:
    return {text: text if most is None else tokenizer.cut(text, most) for text in dict.fromkeys(texts)}


def _joined(tokenizer: Tokenizer, query: str, document: str, pair_format: PairFormat) -> str:
    if pair_format.chat_template is None:
        return query + document
    return tokenizer.apply_chat_template(
        [{"role": "query", "content": query}, {"role": "document", "content": document}],
        add_generation_prompt=False,
        chat_template=pair_format.chat_template,
        **pair_format.chat_template_kwargs,
    )


def cosine(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The cosine similarity of two embeddings [D]. 0 if one of them is 0."""
    norms = math.sqrt(_product(first, first) * _product(second, second))
    return _product(first, second) / norms if norms else 0.0


def max_similarity(query_ND: NDArray[np.float32], document_MD: NDArray[np.float32]) -> float:
    """How well a document's tokens fit a query's: for each token of the query the greatest product with one of the
    document's tokens, added up. ColBERT's score."""
    products_NM: NDArray[np.float64] = np.einsum("nd,md->nm", query_ND, document_MD, dtype=np.float64)
    return math.fsum(products_NM.max(axis=1).tolist())


def _product(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    return float(np.einsum("d,d->", first, second, dtype=np.float64))
