"""Makes prompts of queries and documents, as models of late interaction want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from raycore.client.ask import Ask
from raycore.errors import InvalidRequest
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams

Completion = Callable[[Sequence[Ask], int], Sequence[Ask]]


def prompt_completion(pooling: PoolingSpec | None) -> Completion:
    """Return what gives requests the prompts that a model wants, of at most so many tokens where it cuts them. It
    raises InvalidRequest where it can't.

    `pooling`: what the model pools. None: it generates.
    """
    if pooling is None or pooling.late is None:
        return lambda asks, max_length: asks

    def completed(ask: Ask, max_length: int) -> Ask:
        given = ask.parsed
        if given.second_text:
            raise InvalidRequest("token_type_ids has two texts, and this model takes a query or a document: omit it")
        if given.features:
            raise InvalidRequest("the prompt has images or embeddings, and this model takes a query or a document")
        kind = ask.params.input_type if isinstance(ask.params, PoolingParams) else None
        token_ids = pooling.prompt(given.token_ids, kind, max_length=max_length, is_text=given.is_tokenized)
        return msgspec.structs.replace(ask, prompt=replace(given, token_ids=token_ids, is_tokenized=False))

    return lambda asks, max_length: [completed(ask, max_length) for ask in asks]
