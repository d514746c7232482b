"""vLLM's options that raycore does not have: with a value that asks for nothing, they are taken, and have no effect.

So a script or a command line that names such a default runs as it is. Any other value is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from raycore.errors import InvalidConfig


class VllmOption(NamedTuple):
    """One option of vLLM's that raycore does not have."""

    name: str
    values: tuple[object, ...]
    """Those without effect; None and `ANY` among them."""
    reason: str
    """What raycore does not do, or does anyway, and what to use: for the docs, and when another value is refused."""
    flags: tuple[str, ...] = ()
    """As the command line spells it; none: the name with hyphens."""

    @property
    def is_bool(self) -> bool:
        """Whether its flag has no value."""
        return isinstance(self.values[0], bool)

    @property
    def takes_any(self) -> bool:
        """Whether no value has an effect."""
        return ANY in self.values

    @staticmethod
    def parse(text: str) -> object:
        """What a flag's text stands for: a number, JSON, `none`, or the text itself."""
        if text.lower() in ("none", "true", "false"):
            return {"none": None, "true": True, "false": False}[text.lower()]
        try:
            return json.loads(text)
        except ValueError:
            return text

    def check(self, value: object) -> None:
        """Raises InvalidConfig when the value asks for something."""
        if value is not None and not self.takes_any and value not in self.values:
            raise InvalidConfig(f"{self.name}={value!r}: {self.reason}{self._advice}")

    @property
    def _advice(self) -> str:
        usable = [each for each in self.values if each is not None]
        return f"; omit it, or give {' or '.join(map(repr, usable))}" if usable else "; omit it"


ANY = "any value"

_OFF = (False, None)
_ON = (True, None)
_BOTH = (True, False)

_NO_MEDIA = "models that read images, sound or video are not supported"
_NO_POOLING = "models that embed, classify or score are not supported"
_NO_HUB = "checkpoints are directories, and nothing is downloaded"
_NO_LORA = "LoRA adapters are not supported"
_NO_QUANTIZATION = "quantization is not supported"
_NO_SPECULATION = "speculative decoding is not supported"
_NO_CODE = "code from checkpoints is never run"
_NO_OFFLOADING = "offloading to the CPU's memory is not supported"
_NO_TRANSFER = "KV cache transfer between engines is not supported"
_NOT_COMPILED = "nothing is compiled, and no graphs are captured"
_RAY_ONLY = "workers and ranks are Ray actors"
_ONE_FORMAT = "the checkpoint's own format is found from its files"
_SHARDED_EXPERTS = "experts stay where they are: expert load balancing is not supported"

VLLM_OPTIONS: Mapping[str, VllmOption] = {
    each.name: each
    for each in (
        VllmOption(
            "pipeline_parallel_size",
            (1,),
            "pipeline parallelism is not supported (use tensor_parallel_size)",
            ("-pp", "--pipeline-parallel-size"),
        ),
        VllmOption("decode_context_parallel_size", (1,), "context parallelism is not supported"),
        VllmOption("prefill_context_parallel_size", (1,), "context parallelism is not supported"),
        VllmOption("distributed_executor_backend", ("ray", None), _RAY_ONLY),
        VllmOption("data_parallel_backend", ("ray", None), _RAY_ONLY),
        VllmOption("ray_workers_use_nsight", _OFF, "profiling with Nsight is not supported"),
        VllmOption("max_parallel_loading_workers", (None,), "all workers load their weights at once"),
        VllmOption("disable_custom_all_reduce", _BOTH, "there is no custom all-reduce"),
        VllmOption("enable_eplb", _OFF, _SHARDED_EXPERTS),
        VllmOption("runner", ("auto", "generate", None), _NO_POOLING),
        VllmOption("convert", ("auto", "none", None), _NO_POOLING),
        VllmOption("task", ("auto", "generate", None), _NO_POOLING),
        VllmOption("pooler_config", (None,), _NO_POOLING),
        VllmOption("override_pooler_config", (None,), _NO_POOLING),
        VllmOption("trust_remote_code", _OFF, _NO_CODE),
        VllmOption("logits_processors", (None, [], ()), "logits processors are not supported"),
        VllmOption("model_impl", ("auto", None), _NO_CODE),
        VllmOption("revision", (None,), _NO_HUB),
        VllmOption("code_revision", (None,), _NO_HUB),
        VllmOption("tokenizer_revision", (None,), _NO_HUB),
        VllmOption("hf_token", (ANY,), _NO_HUB),
        VllmOption("download_dir", (ANY,), _NO_HUB),
        VllmOption("hf_config_path", (None,), _NO_HUB),
        VllmOption("hf_overrides", (None, {}), "the checkpoint's config.json can't be overridden (edit a copy)"),
        VllmOption("config_format", ("auto", "hf", None), _ONE_FORMAT),
        VllmOption("model_loader_extra_config", (None, {}), _ONE_FORMAT),
        VllmOption("ignore_patterns", (ANY,), _NO_HUB),
        VllmOption("safetensors_load_strategy", ("lazy", None), "weights are always read lazily"),
        VllmOption("tokenizer_mode", ("auto", "hf", None), "only tokenizer.json is read"),
        VllmOption("skip_tokenizer_init", _OFF, "the tokenizer is always needed"),
        VllmOption("generation_config", ("auto", None), "defaults come from the checkpoint's generation_config.json"),
        VllmOption("override_generation_config", (None, {}), "give SamplingParams instead"),
        VllmOption("rope_scaling", (None, {}), "RoPE scaling is read from the checkpoint's config.json"),
        VllmOption("rope_theta", (None,), "RoPE's base is read from the checkpoint's config.json"),
        VllmOption("disable_sliding_window", _OFF, "sliding windows are as the checkpoint has them"),
        VllmOption("quantization", (None,), _NO_QUANTIZATION, ("-q", "--quantization")),
        VllmOption("kv_cache_dtype", ("auto", None), _NO_QUANTIZATION),
        VllmOption("calculate_kv_scales", _OFF, _NO_QUANTIZATION),
        VllmOption("swap_space", (ANY,), "a request without room is computed again, not swapped"),
        VllmOption("cpu_offload_gb", (0, None), _NO_OFFLOADING),
        VllmOption("kv_offloading_size", (None,), _NO_OFFLOADING),
        VllmOption("prefix_caching_hash_algo", (ANY,), "prefixes are always hashed safely"),
        VllmOption("enable_sleep_mode", _OFF, "sleep mode is not supported"),
        VllmOption("enable_chunked_prefill", _ON, "long prompts are always computed in chunks"),
        VllmOption("max_num_partial_prefills", (1, None), "prompts are computed in the order of arrival"),
        VllmOption("max_long_partial_prefills", (1, None), "prompts are computed in the order of arrival"),
        VllmOption("async_scheduling", _BOTH, "steps are planned ahead where that is possible"),
        VllmOption("scheduler_cls", (None,), "schedulers of one's own are not supported"),
        VllmOption("num_lookahead_slots", (0, None), _NO_SPECULATION),
        VllmOption("speculative_config", (None, {}), _NO_SPECULATION),
        VllmOption("speculative_model", (None,), _NO_SPECULATION),
        VllmOption("enable_lora", _OFF, _NO_LORA),
        VllmOption("lora_modules", (None, [], ()), _NO_LORA),
        VllmOption("max_loras", (ANY,), _NO_LORA),
        VllmOption("max_lora_rank", (ANY,), _NO_LORA),
        VllmOption("max_cpu_loras", (ANY,), _NO_LORA),
        VllmOption("enable_prompt_embeds", _OFF, "prompts that are embeddings are not supported"),
        VllmOption("limit_mm_per_prompt", (None, {}), _NO_MEDIA),
        VllmOption("mm_processor_kwargs", (None, {}), _NO_MEDIA),
        VllmOption("allowed_local_media_path", ("", None), _NO_MEDIA),
        VllmOption("allowed_media_domains", (None, [], ()), _NO_MEDIA),
        VllmOption("kv_transfer_config", (None, {}), _NO_TRANSFER),
        VllmOption("kv_events_config", (None, {}), _NO_TRANSFER),
        VllmOption("max_seq_len_to_capture", (ANY,), _NOT_COMPILED),
        VllmOption("cuda_graph_sizes", (ANY,), _NOT_COMPILED),
        VllmOption("compilation_config", (ANY,), _NOT_COMPILED, ("-O", "--compilation-config")),
        VllmOption("disable_log_stats", _BOTH, "only `raycore serve` logs statistics, unless it has this flag"),
        VllmOption("guided_decoding_backend", ("auto", "guidance", None), "structured outputs are llguidance's"),
        VllmOption("show_hidden_metrics_for_version", (None,), "there are no hidden metrics"),
    )
}
"""By keyword of vLLM's `LLM`, whose spelling with hyphens is its flag."""

VLLM_SERVER_FLAGS: Mapping[str, VllmOption] = {
    each.name: each
    for each in (
        VllmOption("enable_auto_tool_choice", _BOTH, "models may call tools wherever a request has some"),
        VllmOption("disable_log_requests", _ON, "requests are never logged"),
        VllmOption("enable_log_requests", _OFF, "requests are never logged"),
        VllmOption("disable_frontend_multiprocessing", _BOTH, "--api-server-count says how many processes serve"),
        VllmOption("disable_uvicorn_access_log", _ON, "requests are never logged"),
        VllmOption("enable_prompt_tokens_details", _BOTH, "cached tokens are always counted in the usage"),
        VllmOption("chat_template_content_format", ("auto", None), "the form of contents is found from the template"),
        VllmOption("response_role", ("assistant",), "answers have the role assistant"),
        VllmOption("root_path", ("", None), "paths below a prefix are the proxy's business"),
        VllmOption("ssl_keyfile", (None,), "TLS is not supported (put a proxy in front)"),
        VllmOption("ssl_certfile", (None,), "TLS is not supported (put a proxy in front)"),
    )
}
"""Flags of vLLM's server alone."""


def without_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that have no effect.

    Raises:
        InvalidConfig: one of them asks for something that raycore does not do.
    """
    for name, value in options.items():
        if name in VLLM_OPTIONS:
            VLLM_OPTIONS[name].check(value)
    return {name: value for name, value in options.items() if name not in VLLM_OPTIONS}
