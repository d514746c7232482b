"""Which sampling parameters a request has as fields, and of what type: those of `SamplingParams`, but for a table."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from raycore.sampling_params import SamplingParams

SET_OTHERWISE = {
    "stop_after": "chat: the end of the model's reasoning",
    "stop_or_from": "chat: the end of the model's reasoning",
    "max_tokens": "each endpoint: its field and its default differ",
    "logprobs": "each endpoint: its fields differ",
    "logprob_token_ids": "each endpoint: it needs the endpoint's field for log probabilities",
    "structured_outputs": "structured_outputs(): several fields set it",
    "return_hidden_states": "always false: hidden states are for callers in Python",
    "return_prompt_hidden_states": "always false, too",
    "detokenize": "always true: responses are text",
    "flat_logprobs": "always false: responses have log probabilities in OpenAI's form",
    "output_kind": "always cumulative: the server itself makes deltas",
    "stream_interval": "the engine's option",
    "skip_clone": "has no effect",
    "extra_args": "both endpoints: vllm_xargs",
    "reasoning_tags": "each endpoint: those of the reasoning parser",
    "trace_decode_token_ids": "always None: tokens are replayed in Python and by /inference/v1/generate",
    "watermarking": "always None: there are no watermarks",
}
"""The sampling parameters that aren't those of the request's field of the same name, each with what sets it."""

COPIED = tuple(field.name for field in msgspec.structs.fields(SamplingParams) if field.name not in SET_OTHERWISE)
"""The sampling parameters that come from the request's field of the same name. If it is None, they get the default."""


def copied_types() -> dict[str, Any]:
    """By name of a copied parameter: its type, without None and without the range of a number."""
    fields = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    return {name: _without_range(fields[name]) for name in COPIED}


def _without_range(declared: Any) -> Any:
    members = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    plain = (get_args(each)[0] if get_origin(each) is Annotated else each for each in members if each is not NoneType)
    return Union[tuple(plain)]  # noqa: UP007  # of as many as there are
