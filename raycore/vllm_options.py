"""vLLM's options that raycore does not have. A value that needs nothing to be done, such as the default, is accepted.

So scripts and command lines that set such an option to its default run unchanged. Other values raise InvalidConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from raycore.errors import InvalidConfig


class VllmOption(NamedTuple):
    """A vLLM option that raycore does not have."""

    name: str
    values: tuple[object, ...]
    """The accepted values, which have no effect. None is always accepted. `ANY` stands for all values."""
    reason: str
    """Why other values are refused, and what to use instead. Shown in the docs and in the error."""
    flags: tuple[str, ...] = ()
    """The option's flags. Empty: the name with hyphens."""

    @property
    def is_bool(self) -> bool:
        """Whether the option's flag takes no value."""
        return isinstance(self.values[0], bool)

    @property
    def takes_any(self) -> bool:
        """Whether all values are accepted."""
        return ANY in self.values

    @staticmethod
    def parse(text: str) -> object:
        """The value that a flag's text stands for: None, True, False, decoded JSON, or else the text itself."""
        if text.lower() in ("none", "true", "false"):
            return {"none": None, "true": True, "false": False}[text.lower()]
        try:
            return json.loads(text)
        except ValueError:
            return text

    def check(self, value: object) -> None:
        """Raise InvalidConfig if raycore doesn't accept this value of the option."""
        if value is not None and not self.takes_any and value not in self.values:
            raise InvalidConfig(f"{self.name}={value!r}: {self.reason}{self._advice}")

    @property
    def _advice(self) -> str:
        usable = [each for each in self.values if each is not None]
        return f"; omit it, or give {' or '.join(map(repr, usable))}" if usable else "; omit it"


def without_effect(option: str, given: dict[str, Any], settings: Mapping[str, VllmOption]) -> dict[str, Any]:
    """Check those settings of an option, an object in JSON, that raycore doesn't have. Return the other settings.

    Raises:
        InvalidConfig: one of them has a value that raycore does not support.
    """
    for name, value in given.items():
        if name in settings:
            try:
                settings[name].check(value)
            except InvalidConfig as error:
                raise InvalidConfig(f"{option}: {error}") from None
    return {name: value for name, value in given.items() if name not in settings}


ANY = "any value"

_OFF = (False, None)
_ON = (True, None)
_BOTH = (True, False)

_NO_MEDIA = "multimodal models aren't supported"
_NO_POOLING = "embedding, classification and scoring models aren't supported"
_NO_HUB = "checkpoints are local directories and are never downloaded"
_NO_SPECULATION = "use speculative_config"
_NO_CODE = "code from checkpoints is never run"
_NO_OFFLOADING = "CPU offloading isn't supported"
_NO_TRANSFER = "KV cache transfer between engines isn't supported"
_NOT_COMPILED = "models aren't compiled, and the sizes of CUDA graphs follow from max_num_seqs"
_RAY_ONLY = "ranks and workers run on Ray"
_ONE_FORMAT = "the checkpoint's format is detected from its files"
_SHARDED_EXPERTS = "expert load balancing isn't supported"

VLLM_OPTIONS: Mapping[str, VllmOption] = {
    each.name: each
    for each in (
        VllmOption("decode_context_parallel_size", (1,), "context parallelism isn't supported"),
        VllmOption("prefill_context_parallel_size", (1,), "context parallelism isn't supported"),
        VllmOption("distributed_executor_backend", ("ray", None), _RAY_ONLY),
        VllmOption("data_parallel_backend", ("ray", None), _RAY_ONLY),
        VllmOption("ray_workers_use_nsight", _OFF, "profiling with Nsight isn't supported"),
        VllmOption("max_parallel_loading_workers", (None,), "all workers load their weights at once"),
        VllmOption("disable_custom_all_reduce", _BOTH, "there is no custom all-reduce"),
        VllmOption("enable_eplb", _OFF, _SHARDED_EXPERTS),
        VllmOption("runner", ("auto", "generate", None), _NO_POOLING),
        VllmOption("convert", ("auto", "none", None), _NO_POOLING),
        VllmOption("task", ("auto", "generate", None), _NO_POOLING),
        VllmOption("pooler_config", (None,), _NO_POOLING),
        VllmOption("override_pooler_config", (None,), _NO_POOLING),
        VllmOption("trust_remote_code", _OFF, _NO_CODE),
        VllmOption("logits_processors", (None, [], ()), "logits processors aren't supported"),
        VllmOption("model_impl", ("auto", None), _NO_CODE),
        VllmOption("revision", (None,), _NO_HUB),
        VllmOption("code_revision", (None,), _NO_HUB),
        VllmOption("tokenizer_revision", (None,), _NO_HUB),
        VllmOption("hf_token", (ANY,), _NO_HUB),
        VllmOption("download_dir", (ANY,), _NO_HUB),
        VllmOption("hf_config_path", (None,), _NO_HUB),
        VllmOption("hf_overrides", (None, {}), "the checkpoint's config.json can't be overridden (edit a copy)"),
        VllmOption("config_format", ("auto", "hf", None), _ONE_FORMAT),
        VllmOption("ignore_patterns", (ANY,), _NO_HUB),
        VllmOption("safetensors_load_strategy", ("lazy", None), "weights are always read lazily"),
        VllmOption("tokenizer_mode", ("auto", "hf", None), "only tokenizer.json is read"),
        VllmOption("skip_tokenizer_init", _OFF, "the tokenizer is always needed"),
        VllmOption("generation_config", ("auto", None), "defaults come from the checkpoint's generation_config.json"),
        VllmOption(
            "override_generation_config", (None, {}), "generation defaults can't be overridden (use SamplingParams)"
        ),
        VllmOption("rope_scaling", (None, {}), "RoPE scaling is read from the checkpoint's config.json"),
        VllmOption("rope_theta", (None,), "RoPE's base is read from the checkpoint's config.json"),
        VllmOption("disable_sliding_window", _OFF, "the checkpoint's sliding windows are always used"),
        VllmOption("calculate_kv_scales", _OFF, "kv_cache_dtype needs no calibrated scales"),
        VllmOption("swap_space", (ANY,), "preempted requests are recomputed, not swapped"),
        VllmOption("cpu_offload_gb", (0, None), _NO_OFFLOADING),
        VllmOption("kv_offloading_size", (None,), _NO_OFFLOADING),
        VllmOption("prefix_caching_hash_algo", (ANY,), "prefixes are always hashed with BLAKE2b"),
        VllmOption("enable_sleep_mode", _BOTH, "an engine can always sleep"),
        VllmOption("enable_chunked_prefill", _ON, "chunked prefill is always on"),
        VllmOption(
            "max_num_partial_prefills", (1, None), "the scheduler decides how many prompts are prefilled at a time"
        ),
        VllmOption(
            "max_long_partial_prefills", (1, None), "the scheduler decides how many prompts are prefilled at a time"
        ),
        VllmOption("long_prefill_token_threshold_adaptive", _OFF, "the threshold is always the configured number"),
        VllmOption("num_lookahead_slots", (0, None), _NO_SPECULATION),
        VllmOption("speculative_model", (None,), _NO_SPECULATION),
        VllmOption("enable_prompt_embeds", _OFF, "prompt embeddings aren't supported"),
        VllmOption("limit_mm_per_prompt", (None, {}), _NO_MEDIA),
        VllmOption("mm_processor_kwargs", (None, {}), _NO_MEDIA),
        VllmOption("allowed_local_media_path", ("", None), _NO_MEDIA),
        VllmOption("allowed_media_domains", (None, [], ()), _NO_MEDIA),
        VllmOption("kv_transfer_config", (None, {}), _NO_TRANSFER),
        VllmOption("kv_events_config", (None, {}), _NO_TRANSFER),
        VllmOption("max_seq_len_to_capture", (ANY,), _NOT_COMPILED),
        VllmOption("cuda_graph_sizes", (ANY,), _NOT_COMPILED),
        VllmOption("compilation_config", (ANY,), _NOT_COMPILED, ("-O", "--compilation-config")),
        VllmOption(
            "disable_log_stats", _BOTH, "only `raycore serve` logs statistics, and there this flag turns them off"
        ),
        VllmOption("guided_decoding_backend", ("auto", "guidance", None), "structured outputs always use llguidance"),
        VllmOption("show_hidden_metrics_for_version", (None,), "there are no hidden metrics"),
    )
}
"""The options, by keyword argument of vLLM's `LLM`."""

VLLM_SERVER_FLAGS: Mapping[str, VllmOption] = {
    each.name: each
    for each in (
        VllmOption("enable_auto_tool_choice", _BOTH, "models can call tools in every request that has some"),
        VllmOption("disable_log_requests", _ON, "requests are never logged"),
        VllmOption("enable_log_requests", _OFF, "requests are never logged"),
        VllmOption("disable_frontend_multiprocessing", _BOTH, "--api-server-count sets the number of server processes"),
        VllmOption("disable_uvicorn_access_log", _ON, "requests are never logged"),
        VllmOption("enable_prompt_tokens_details", _BOTH, "usage always includes the number of cached tokens"),
        VllmOption("chat_template_content_format", ("auto", None), "the content format is detected from the template"),
        VllmOption("response_role", ("assistant",), "responses always have the role assistant"),
        VllmOption("root_path", ("", None), "path prefixes aren't supported (strip them in a proxy)"),
        VllmOption("ssl_keyfile", (None,), "TLS isn't supported (put a proxy in front)"),
        VllmOption("ssl_certfile", (None,), "TLS isn't supported (put a proxy in front)"),
    )
}
"""Options that only vLLM's server has, by name with underscores."""


def without_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of vLLM's options, and return only the other options.

    Raises:
        InvalidConfig: a vLLM option has a value that raycore does not support.
    """
    for name, value in options.items():
        if name in VLLM_OPTIONS:
            VLLM_OPTIONS[name].check(value)
    return {name: value for name, value in options.items() if name not in VLLM_OPTIONS}
