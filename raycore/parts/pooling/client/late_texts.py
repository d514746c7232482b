"""Makes prompts of queries and documents, as models of late interaction want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from raycore.client.ask import Ask
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams

Completion = Callable[[Sequence[Ask]], Sequence[Ask]]


def prompt_completion(pooling: PoolingSpec | None) -> Completion:
    """Return what gives requests the prompts that a model wants. `pooling`: what it pools. None: it generates."""
    if pooling is None or pooling.late is None:
        return lambda asks: asks

    def completed(ask: Ask) -> Ask:
        kind = ask.params.input_type if isinstance(ask.params, PoolingParams) else None
        prompt = replace(ask.parsed, token_ids=pooling.prompt(ask.parsed.token_ids, kind))
        return msgspec.structs.replace(ask, prompt=prompt)

    return lambda asks: list(map(completed, asks))
