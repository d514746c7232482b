"""Requests as tests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycore.client.ask import Ask, CheckedAsk
from raycore.client.inputs import ParsedPrompt
from raycore.parts.pooling.client.pooling import PLACEHOLDER
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams


def checked(
    request_id: str,
    token_ids: Sequence[int],
    params: SamplingParams | PoolingParams | None = None,
    *,
    text: str | None = None,
    **fields: Any,
) -> CheckedAsk:
    """A request as a client has checked it. `fields`: those of `Ask`."""
    ask = Ask(ParsedPrompt(text, list(token_ids)), params or SamplingParams(), request_id, **fields)
    pooling = ask.params if isinstance(ask.params, PoolingParams) else None
    own = PLACEHOLDER if pooling is not None else ask.params
    assert isinstance(own, SamplingParams)
    return CheckedAsk(ask, request_id, ask.priority, ask.data_parallel_rank, own, [], pooling=pooling)


def asks(*request_ids: str, prompt: Any = (5, 6, 7), params: Any = None, **fields: Any) -> list[Ask]:
    """Requests that ask the same. `fields`: those of `Ask`."""
    parsed = prompt if isinstance(prompt, ParsedPrompt) else ParsedPrompt(None, list(prompt))
    return [Ask(parsed, params or SamplingParams(), each, **fields) for each in request_ids]
