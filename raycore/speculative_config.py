"""The option `speculative_config`: how the next tokens of requests are guessed. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options import json_object
from raycore.vllm_options import VllmOption

MAX_SPECULATIVE_TOKENS = 64

_DEFAULT_LOOKUP = 5
_LookupSize = Annotated[int, Meta(ge=1, le=64)]


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of speculative decoding, under vLLM's names."""

    method: Literal["ngram", "suffix"]
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)]
    """Maximum number of a request's tokens that are guessed at a time."""
    prompt_lookup_min: _LookupSize = _DEFAULT_LOOKUP
    """ngram: the least number of last tokens that must have occurred before."""
    prompt_lookup_max: _LookupSize = _DEFAULT_LOOKUP
    """ngram: among earlier occurrences, the one with the longest match counts, up to this number of tokens."""
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=1024)] = 24
    """suffix: maximum number of tokens of a match and a guess together."""
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10000
    """suffix: number of finished outputs in which matches are searched, too."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0)] = 1.0
    """suffix: maximum length of a guess, as a multiple of the match's length."""
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """suffix: a guess ends before its probability falls below this."""


_ONE_WAY = "a draft is accepted exactly if it is the token that would have been sampled"
_NO_DRAFT_MODEL = "drafts don't come from a model"

_WITHOUT_EFFECT: Mapping[str, VllmOption] = {
    each.name: each
    for each in (
        VllmOption("rejection_sample_method", ("standard",), _ONE_WAY),
        VllmOption("draft_sample_method", ("greedy", "probabilistic"), _ONE_WAY),
        VllmOption("synthetic_acceptance_rates", (None,), _ONE_WAY),
        VllmOption("synthetic_acceptance_length", (None,), _ONE_WAY),
        VllmOption(
            "num_speculative_tokens_per_batch_size",
            (None,),
            "the number of drafts follows from measured step times and acceptance",
        ),
        VllmOption("disable_padded_drafter_batch", (True, False), _NO_DRAFT_MODEL),
        VllmOption("parallel_drafting", (False,), _NO_DRAFT_MODEL),
    )
}
"""vLLM's other settings. Values other than these are refused."""


def parse_speculative_config(value: str | dict[str, Any] | None) -> SpeculativeConfig | None:
    """Convert what users pass. None and an empty object turn speculation off.

    Raises:
        InvalidConfig: the value isn't a JSON object, or a setting is unknown, invalid or unsupported.
    """
    if value is None:
        return None
    given = json_object("speculative_config", value)
    for name in [name for name in given if name in _WITHOUT_EFFECT]:
        try:
            _WITHOUT_EFFECT[name].check(given.pop(name))
        except InvalidConfig as error:
            raise InvalidConfig(f"speculative_config: {error}") from None
    given = {name: each for name, each in given.items() if each is not None}
    if not given:
        return None
    _fill_in(given)
    try:
        config = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"speculative_config: {error}") from None
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise InvalidConfig(
            f"speculative_config: prompt_lookup_min={config.prompt_lookup_min} is above "
            f"prompt_lookup_max={config.prompt_lookup_max}"
        )
    return config


def _fill_in(given: dict[str, Any]) -> None:
    """Add what vLLM derives from other settings."""
    if given.get("method") == "suffix":
        given.setdefault("num_speculative_tokens", given.get("suffix_decoding_max_tree_depth", 24))
    for name, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
        if other in given:
            given.setdefault(name, given[other])
