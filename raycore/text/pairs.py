"""Scores of pairs of texts, such as a question and a document: prompts of both, or similarities of embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest
from raycore.text.cuts import Side
from raycore.text.tokenizer import Tokenizer

Pair = tuple[str, str]

_OWN_VARIABLES = ("chat_template", "messages", "tools", "add_generation_prompt", "continue_final_message")


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


def pair_prompts(tokenizer: Tokenizer, pairs: Sequence[Pair], pair_format: PairFormat) -> list[dict[str, Any]]:
    """The prompts of pairs of texts: each has `prompt_token_ids`, and `token_type_ids` if those aren't all 0.

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
        return [_prompt(pair.token_ids, pair.type_ids) for pair in joined]
    texts = [_text(tokenizer, pair, pair_format) for pair in pairs]
    if pair_format.truncate_prompt_tokens is None:
        encoded = tokenizer.encode_batch(texts)
    else:
        encoded = tokenizer.encode_within(texts, pair_format.truncate_prompt_tokens, side=pair_format.truncation_side)
    return [_prompt(token_ids, []) for token_ids in encoded]


def _prompt(token_ids: list[int], type_ids: Sequence[int]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    return prompt | {"token_type_ids": list(type_ids)} if any(type_ids) else prompt


def _text(tokenizer: Tokenizer, pair: Pair, pair_format: PairFormat) -> str:
    limits = pair_format.max_tokens_per_query, pair_format.max_tokens_per_doc
    query, document = (
        text if most is None else tokenizer.cut(text, most) for text, most in zip(pair, limits, strict=True)
    )
    if pair_format.chat_template is None:
        return query + document
    taken = next((name for name in _OWN_VARIABLES if name in pair_format.chat_template_kwargs), None)
    if taken is not None:
        raise InvalidRequest(f"chat_template_kwargs has {taken!r}, which is set for the template already")
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
