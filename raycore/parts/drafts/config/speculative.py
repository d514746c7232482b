"""The option `speculative_config`: how the next tokens of requests are guessed. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.checkpoint.hub_cache import find_directory
from raycore.errors import InvalidConfig
from raycore.options.declared import json_object, option, settings_of
from raycore.options.vllm_options import VllmOption, without_effect
from raycore.parts.drafts.checkpoint.eagle3 import is_eagle3

MAX_SPECULATIVE_TOKENS = 64

_DEFAULT_LOOKUP = 5
_MTP_NAMES = (
    "deepseek_mtp",
    "ernie_mtp",
    "glm4_moe_mtp",
    "glm4_moe_lite_mtp",
    "mimo_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
    "step3p5_mtp",
)
"""vLLM's other names of the method `mtp`, each for an architecture."""
_LookupSize = Annotated[int, Meta(ge=1, le=64)]
_BatchSize = Annotated[int, Meta(ge=1)]
_NumTokens = Annotated[int, Meta(ge=0)]


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's settings of speculative decoding, under vLLM's names."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)]
    """Maximum number of a request's tokens that are guessed at a time."""
    model: str | None = None
    """draft_model, eagle3: the directory of the draft model's or the head's checkpoint."""
    draft_tensor_parallel_size: Annotated[int, Meta(ge=1)] | None = None
    """draft_model, eagle3, mtp: number of workers that share the draft model: 1 or as many as share the target. None:
    as many."""
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    """draft_model, eagle3, mtp: longer sequences have no drafts. None: as long as the draft model and the target can
    be."""
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
    num_speculative_tokens_per_batch_size: (
        Annotated[list[tuple[_BatchSize, _BatchSize, _NumTokens]], Meta(min_length=1)] | None
    ) = None
    """(from, to, number): how many tokens are guessed for each request if a step has so many decodes, as long as
    `num_speculative_tokens` allows. Between two ranges and after the last one, the range before counts. None: as many
    as should pay by measured times."""

    @property
    def has_model(self) -> bool:
        """Whether workers compute the drafts, with a model."""
        return self.method == "draft_model" or self.has_head

    @property
    def has_head(self) -> bool:
        """Whether what drafts reads the target's hidden states."""
        return self.method in ("eagle3", "mtp")

    def fixed_length(self, num_decodes: int) -> int | None:
        """Return how many tokens are guessed for each of so many decodes. None: as many as should pay."""
        if self.num_speculative_tokens_per_batch_size is None:
            return None
        return max(entry for entry in self.num_speculative_tokens_per_batch_size if entry[0] <= num_decodes)[2]


class SpeculativeShorthand(msgspec.Struct, frozen=True):
    """vLLM's short options for settings of `speculative_config`."""

    spec_method: Annotated[str | None, option("The same as speculative_config's method.")] = None
    spec_model: Annotated[str | None, option("The same as speculative_config's model.", metavar="DIR")] = None
    spec_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, option("The same as speculative_config's num_speculative_tokens.")
    ] = None


def with_shorthands(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's options with `speculative_config` in place of its short options.

    Raises:
        InvalidConfig: a setting is given twice.
    """
    short = {
        "method": chosen.get("spec_method"),
        "model": chosen.get("spec_model"),
        "num_speculative_tokens": chosen.get("spec_tokens"),
    }
    given = {name: value for name, value in short.items() if value is not None}
    rest = {name: value for name, value in chosen.items() if not name.startswith("spec_")}
    if not given:
        return rest
    config = rest.get("speculative_config")
    if isinstance(config, SpeculativeConfig):  # of a flag, which has a method and a number
        config = msgspec.structs.asdict(config)
    settings = json_object("speculative_config", config or {})
    for name, value in given.items():
        if settings.get(name) is not None:
            raise InvalidConfig(
                f"speculative_config has {name!r}, and its short option is given, too: omit one of them"
            )
        settings[name] = value
    return {**rest, "speculative_config": settings}


_ONE_WAY = "a draft is accepted exactly if it is the token that would have been sampled"
_ONE_BY_ONE = "a draft's tokens are computed one after the other"
_AS_TARGET = "the draft model is computed as the target is"
_NO_HUB = "a draft model named as on the hub is that of its branch main (or give its directory)"
_SAME_VOCABULARY = "the draft model needs the target's tokenizer"
_OTHER_METHOD = "its method isn't supported"
_BOTH = (True, False)

_WITHOUT_EFFECT = (
    VllmOption("rejection_sample_method", ("standard",), _ONE_WAY),
    VllmOption("draft_sample_method", ("greedy", "probabilistic"), _ONE_WAY),
    VllmOption("synthetic_acceptance_rates", (None,), _ONE_WAY),
    VllmOption("synthetic_acceptance_length", (None,), _ONE_WAY),
    VllmOption("disable_padded_drafter_batch", _BOTH, "batches of drafts are never padded"),
    VllmOption("parallel_drafting", (False,), _ONE_BY_ONE),
    VllmOption("enforce_eager", _BOTH, "drafts are computed without CUDA graphs"),
    VllmOption("tensor_parallel_size", (None,), "use draft_tensor_parallel_size"),
    VllmOption("quantization", (None,), "draft models aren't quantized"),
    VllmOption("moe_backend", (None, "auto"), _AS_TARGET),
    VllmOption("attention_backend", (None, "auto"), _AS_TARGET),
    VllmOption("kv_cache_dtype", (None, "auto"), "the draft model's KV cache stores what the target's stores"),
    VllmOption("draft_load_config", (None,), _AS_TARGET),
    VllmOption("revision", (None,), _NO_HUB),
    VllmOption("code_revision", (None,), _NO_HUB),
    VllmOption("use_heterogeneous_vocab", (False,), _SAME_VOCABULARY),
    VllmOption("use_local_argmax_reduction", _BOTH, "drafts follow the requests' sampling parameters"),
    VllmOption("disable_eagle_block_drop", _BOTH, "blocks in the prefix cache are always used"),
    VllmOption("index_share_for_mtp_iteration", (None,), _OTHER_METHOD),
    VllmOption("dspark_draft_topk", (None,), _OTHER_METHOD),
    VllmOption("enable_adaptive_verification", (False,), _OTHER_METHOD),
)
"""vLLM's other settings. Values other than these are refused."""


def parse_speculative_config(value: str | dict[str, Any] | None) -> SpeculativeConfig | None:
    """Convert what users pass. None and an empty object turn speculation off.

    Raises:
        InvalidConfig: the value isn't a JSON object, or a setting is unknown, invalid or unsupported.
    """
    if value is None:
        return None
    given = without_effect("speculative_config", json_object("speculative_config", value), _WITHOUT_EFFECT)
    given = {name: each for name, each in given.items() if each is not None}
    if not given:
        return None
    _fill_in(given)
    config = settings_of("speculative_config", given, SpeculativeConfig)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise InvalidConfig(
            f"speculative_config: prompt_lookup_min={config.prompt_lookup_min} is above "
            f"prompt_lookup_max={config.prompt_lookup_max}"
        )
    _check_model(config)
    _check_batch_sizes(config)
    return config


def _check_model(config: SpeculativeConfig) -> None:
    if config.method == "mtp" and config.model is not None:
        raise InvalidConfig(
            f"speculative_config: model={config.model!r}, and method='mtp' drafts with layers of the engine's own "
            "checkpoint: omit it"
        )
    if config.has_model and config.model is None and config.method != "mtp":
        raise InvalidConfig(
            f"speculative_config: method={config.method!r} needs model, the directory of the draft model's checkpoint"
        )
    for name in () if config.has_model else ("model", "draft_tensor_parallel_size", "max_model_len"):
        if getattr(config, name) is not None:
            raise InvalidConfig(
                f"speculative_config: {name}={getattr(config, name)!r} is for drafts from a model, and "
                f"method={config.method!r} needs none: omit it"
            )


def _check_batch_sizes(config: SpeculativeConfig) -> None:
    last, ranges = 0, config.num_speculative_tokens_per_batch_size
    for index, (start, end, _) in enumerate(ranges or ()):
        if end < start or start <= last or (index == 0 and start > 1):
            raise InvalidConfig(
                f"speculative_config: num_speculative_tokens_per_batch_size={ranges}: expected ranges of batch sizes "
                f"from 1 on, in ascending order, none of which overlap: {start} to {end} is wrong"
            )
        last = end


def _fill_in(given: dict[str, Any]) -> None:
    """Add what vLLM derives from other settings."""
    for name in ("method", "model"):
        if given.get(name) in ("[ngram]", "ngram_gpu"):
            given["method"] = "ngram"  # older or other names of the same
            if name == "model":
                del given["model"]
    if given.get("model") in ("ngram", "suffix") and given.get("method", given["model"]) == given["model"]:
        given["method"] = given.pop("model")
    if given.get("method") in _MTP_NAMES:
        given["method"] = "mtp"
    if "method" not in given and isinstance(given.get("model"), str):
        given["method"] = "eagle3" if is_eagle3(find_directory(given["model"], of="the draft model")) else "draft_model"
    if given.get("method") == "suffix":
        given.setdefault("num_speculative_tokens", given.get("suffix_decoding_max_tree_depth", 24))
    for name, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
        if other in given:
            given.setdefault(name, given[other])
