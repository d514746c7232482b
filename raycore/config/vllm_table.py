"""vLLM's options that raycore does not have, by reason: all of vLLM 0.32, and some that older versions had.

None is accepted for each of them, and so are the values that this table has.
"""

from __future__ import annotations

__all__ = ["ONLY_OF_SERVERS", "VLLM_OPTIONS", "VLLM_SERVER_FLAGS", "without_vllm_options"]

from collections.abc import Mapping
from typing import Any, cast

from raycore.options.vllm_options import ANY, VllmOption
from raycore.parts.constraints.config.structured_outputs import GRAMMAR_BACKENDS

_FLAG = (False, True)
"""Neither value needs anything to be done."""

_FLAGS = {
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_address": "-dpa",
    "data_parallel_backend": "-dpb",
    "data_parallel_multi_port_external_lb": "-dpm",
    "diffusion_config": "-dc",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
}
"""Short flags."""


def _values(value: Any) -> tuple[object, ...]:
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)


def _options(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, VllmOption]:
    found: dict[str, VllmOption] = {}
    for reason, accepted in groups.items():
        for name, value in accepted.items():
            flags = (_FLAGS[name], f"--{name.replace('_', '-')}") if name in _FLAGS else ()
            found[name] = VllmOption(name, _values(value), reason, flags)
    return found


VLLM_OPTIONS = _options(
    {
        "raycore has no such option of multimodal models": {
            "default_mm_loras": {},
            "enable_mm_processor_stats": False,
            "enable_tower_connector_lora": False,
            "io_processor_plugin": (),
            "mm_device_do_normalize": _FLAG,
            "mm_encoder_attn_backend": (),
            "mm_encoder_attn_dtype": (),
            "mm_encoder_fp8_scale_path": (),
            "mm_encoder_fp8_scale_save_margin": 1.5,
            "mm_encoder_fp8_scale_save_path": (),
            "mm_encoder_only": False,
            "mm_encoder_tp_mode": "weights",
            "mm_hasher_algorithm": ANY,
            "mm_ipc_gpu_memory_gb": 0,
            "mm_processor_cache_type": "lru",
            "mm_processor_device": "auto",
            "mm_shm_cache_max_object_size_mb": 128,
            "mm_tensor_ipc": "direct_rpc",
            "renderer_num_workers": 1,
            "skip_mm_profiling": _FLAG,
            "video_pruning_method": "evs",
            "video_pruning_rate": (),
        },
        "the encoder cache has no settings of its own": {"ec_manager_config": {}},
        "adapters don't change the heads of models that classify": {"max_lora_cls_labels": ()},
        "raycore has no diffusion models": {"diffusion_config": {}},
        "how layers that keep states are computed, and what states are stored in, isn't an option; and raycore has no "
        "models with n-gram memory": {
            "enable_mamba_cache_stochastic_rounding": False,
            "enable_mamba_shared_prefix_checkpoint": False,
            "engram_config": {},
            "gdn_prefill_backend": (),
            "kda_decode_backend": (),
            "kda_prefill_backend": (),
            "mamba_backend": "triton",
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_cache_philox_rounds": 0,
            "mamba_config": {},
            "mamba_ssm_cache_dtype": "auto",
            "mamba_ssu_algorithm": (),
            "replayssm_buffer_len": 16,
            "sparse_indexer_topk_backend": "auto",
            "use_replayssm": False,
        },
        "context parallelism divides tokens, and exchanges queries and results, in raycore's own way": {
            "cp_kv_cache_interleave_size": 1,
            "dcp_comm_backend": ("ag_rs", "a2a"),
            "dcp_kv_cache_interleave_size": 1,
            "dcp_q_replicate": False,
            "enable_hc_sp": False,
        },
        "ranks and workers run on Ray, which places them on the nodes of its cluster (see placement_strategy)": {
            "data_parallel_address": ANY,
            "data_parallel_backend": ("ray", "mp"),
            "data_parallel_multi_port_external_lb": False,
            "master_addr": "127.0.0.1",
            "master_port": 29501,
            "nnodes": 1,
            "node_rank": 0,
            "numa_bind": False,
            "numa_bind_cpus": (),
            "numa_bind_nodes": (),
        },
        "raycore has no other executors: an engine starts its workers on Ray. Start the program once, without "
        "torchrun, with the same tensor_parallel_size, pipeline_parallel_size and data_parallel_size": {
            "distributed_executor_backend": ("ray", "mp", "uni"),
        },
        "raycore has timeouts of its own (use step_timeout_s and init_timeout_s)": {
            "cpu_distributed_timeout_seconds": (),
            "distributed_timeout_seconds": (),
        },
        "ranks that share experts agree before every step": {
            "disable_nccl_for_dp_synchronization": _FLAG,
        },
        "lost ranks are always replaced (use max_request_replays and the other options of recovery)": {
            "enable_fault_tolerance": _FLAG,
            "fault_tolerance_config": {},
        },
        "experts are always spread evenly, in order": {
            "elastic_ep_max_dp_size": (),
            "enable_eplb": False,
            "enable_ep_weight_filter": _FLAG,
            "eplb_config": {},
            "expert_placement_strategy": "linear",
        },
        "the number of ranks that share experts can always be changed (use `raycore scale`)": {
            "enable_elastic_ep": _FLAG
        },
        "raycore has no dual-batch overlap": {
            "dbo_decode_token_threshold": ANY,
            "dbo_prefill_token_threshold": ANY,
            "enable_dbo": False,
            "ubatch_size": (0, 1),
        },
        "raycore chooses its kernels and its ways of communication (use attention_backend)": {
            "all2all_backend": ANY,
            "attention_config": {},
            "disable_cascade_attn": _FLAG,
            "disable_custom_all_reduce": _FLAG,
            "enable_batch_sharded_sampling": _FLAG,
            "enable_flashinfer_autotune": _FLAG,
            "enable_nccl_comm_suspend": False,
            "enable_shm_tensor_arena": _FLAG,
            "ir_op_priority": {},
            "kernel_config": {},
            "linear_backend": "auto",
            "moe_backend": "auto",
        },
        "models aren't compiled, and the sizes of CUDA graphs follow from max_num_seqs": {
            "compilation_config": ANY,
            "cuda_graph_sizes": ([], ANY),
            "cudagraph_capture_sizes": ([], ANY),
            "cudagraph_metrics": False,
            "jit_monitor_mode": ANY,
            "jit_monitor_verbose": _FLAG,
            "max_cudagraph_capture_size": ANY,
            "max_seq_len_to_capture": ANY,
            "optimization_level": ANY,
            "performance_mode": "balanced",
        },
        "code from checkpoints is never run": {"code_revision": ANY, "trust_remote_code": _FLAG},
        "tokens of the hub are those of HF_TOKEN and `hf auth login`": {"hf_token": ANY},
        "only what raycore reads is downloaded": {"ignore_patterns": ANY},
        "the model is described by the checkpoint's config.json (use hf_overrides)": {
            "disable_sliding_window": False,
            "model_class_overrides": {},
            "rope_scaling": {},
            "rope_theta": (),
        },
        "the checkpoint's format is detected from its files": {
            "config_format": ("auto", "hf"),
            "enable_mixed_moe_lora_format": False,
            "enable_moe_shared_loras": False,
            "model_weights": "",
            "quantization_config": {},
        },
        "old formats of quantized weights aren't read": {"allow_deprecated_quantization": False},
        "tokenizers are those of Hugging Face, in tokenizer.json": {"tokenizer_mode": ("auto", "hf", "slow")},
        "weights are always read lazily, by all workers at once": {
            "max_parallel_loading_workers": (),
            "pt_load_map_location": ANY,
            "safetensors_load_strategy": "lazy",
            "safetensors_prefetch_block_size": ANY,
            "safetensors_prefetch_num_threads": ANY,
        },
        "weights and KV caches stay in the device's memory, and preempted requests are recomputed": {
            "cpu_offload_gb": 0,
            "cpu_offload_params": ([],),
            "kv_offloading_backend": "native",
            "offload_backend": "auto",
            "offload_group_size": 0,
            "offload_num_in_group": 1,
            "offload_params": ([],),
            "offload_prefetch_step": 1,
            "swap_space": ANY,
        },
        "an engine can always sleep, and gives up or keeps all its weights": {
            "enable_cumem_allocator": _FLAG,
            "enable_sleep_mode": _FLAG,
            "sleep_mode_offload_cudagraph": _FLAG,
            "sleep_preserve_parameter_names": ([],),
        },
        "prefixes are always hashed with BLAKE2b, in whole blocks, and kept while there is memory": {
            "prefix_cache_retention_interval": 0,
            "prefix_caching_hash_algo": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "builtin"),
            "prefix_match_unit": (),
        },
        "all layers store keys and values in the same data type (use kv_cache_dtype)": {
            "calculate_kv_scales": False,
            "kv_cache_dtype_skip_layers": ([],),
            "kv_sharing_fast_prefill": False,
            "swa_bounded_replay": _FLAG,
        },
        "chunked prefill is always on": {"enable_chunked_prefill": True},
        "the scheduler decides how many prompts are prefilled at a time (use max_num_seqs and "
        "max_num_batched_tokens)": {
            "long_prefill_token_threshold_adaptive": False,
            "max_long_partial_prefills": 1,
            "max_num_active_seqs": (),
            "max_num_partial_prefills": 1,
            "max_num_scheduled_tokens": (),
            "prefill_schedule_interval": 1,
            "scheduler_reserve_full_isl": _FLAG,
            "watermark": 0.0,
        },
        "the engine takes all requests (use max_concurrent_requests of the server)": {
            "max_num_queued_reqs": (),
            "max_num_queued_tokens": (),
        },
        "use speculative_config": {
            "num_lookahead_slots": 0,
            "speculative_model": (),
        },
        "steps take tokens, and return tokens and log probabilities": {
            "aux_output_config": {},
            "return_sampling_mask": False,
        },
        "random numbers are always a function of the seed and the position": {
            "use_fp64_gumbel": _FLAG,
        },
        "any request may replay tokens (trace_decode_token_ids)": {"enable_trace_replay": _FLAG},
        "raycore has no watermarks": {"watermark_config": {}},
        "structured outputs always use llguidance, whatever the backend": {"guided_decoding_backend": GRAMMAR_BACKENDS},
        "plugins are installed packages (see docs/plugins.md)": {
            "additional_config": {},
        },
        "adapters are divided as the model is, in its data type (see docs/architecture/lora.md)": {
            "fully_sharded_loras": _FLAG,
            "lora_dtype": "auto",
            "lora_target_modules": ([],),
            "specialize_active_lora": _FLAG,
        },
        "profiles are those of profiler_config": {
            "collect_detailed_traces": ([],),
            "enable_layerwise_nvtx_tracing": False,
            "ray_workers_use_nsight": False,
        },
        "metrics are those of docs/architecture/observability.md": {
            "aggregate_engine_logging": _FLAG,
            "custom_histogram_buckets": {},
            "enable_logging_iteration_details": False,
            "enable_mfu_metrics": False,
            "kv_cache_metrics": False,
            "kv_cache_metrics_sample": ANY,
            "per_request_spec_decode_metrics": "none",
            "show_hidden_metrics_for_version": (),
        },
        "only `raycore serve` logs statistics, and there this flag turns them off": {"disable_log_stats": _FLAG},
        "logs are those of Python's logging (use --log-level on the command line)": {
            "log_config_file": (),
            "log_level": (),
            "logging_config": (),
        },
        "variables of vLLM's environment aren't checked": {"fail_on_environ_validation": _FLAG},
        "use shutdown_timeout_s and drain_timeout_s": {"shutdown_timeout": 0},
    }
)
"""The options, by keyword argument of vLLM's `LLM`."""

VLLM_SERVER_FLAGS = _options(
    {
        "models can call tools in every request that has some": {"enable_auto_tool_choice": _FLAG},
        "requests are logged with enable_log_requests only": {"disable_log_requests": _FLAG},
        "--api-server-count sets the number of server processes": {"disable_frontend_multiprocessing": _FLAG},
        "all ranks belong to one engine, with one server on one port": {
            "data_parallel_supervisor_port": ANY,
            "dp_supervisor_probe_failure_threshold": ANY,
            "dp_supervisor_probe_interval_s": ANY,
            "dp_supervisor_probe_timeout_s": ANY,
            "enable_scale_out": False,
        },
        "the server speaks HTTP": {"grpc": False, "grpc_port": ()},
        "usage always includes the number of cached tokens": {"enable_prompt_tokens_details": _FLAG},
        "the server has metrics of all requests together (see /metrics)": {"enable_per_request_metrics": False},
        "the content format is detected from the template": {
            "chat_template_content_format": ("auto", "openai", "string")
        },
        "schemas are followed where the request says so": {"tool_strict_level": "auto"},
        "tools run in the client": {"tool_server": ()},
        "raycore has no multimodal models": {"trust_request_mm_kwargs": False},
        "raycore has no embedding, classification and scoring models": {"enable_flash_late_interaction": _FLAG},
        "reasoning that a message disables has the effort 'none'": {"anthropic_disabled_thinking_effort": ANY},
        "raycore doesn't have Cohere's API of chat": {
            "cohere_format": ANY,
            "cohere_is_reasoning_model": _FLAG,
        },
        "a start shows its progress on terminals only": {"use_tqdm_on_load": _FLAG},
        "the load is always in /load": {"enable_server_load_tracking": _FLAG},
        "responses always have the header X-Request-Id": {"enable_request_id_headers": _FLAG},
        "responses have no system_fingerprint": {"fingerprint_mode": ANY, "fingerprint_value": ()},
        "errors that are the server's are always logged with a traceback": {"log_error_stack": _FLAG},
        "/docs loads its scripts from the internet, and /openapi.json needs none": {"enable_offline_docs": False},
    }
)
"""Options that only vLLM's server has, by name with underscores."""


ONLY_OF_SERVERS = ("served_model_name", "reasoning_parser", "reasoning_parser_plugin")
"""Options of servers that vLLM's `LLM` takes, too. `resolve()` reads the parser's; a name has no effect there."""


def without_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of vLLM's options, and return only the other options.

    Raises:
        InvalidConfig: a vLLM option has a value that raycore does not support.
    """
    for name, value in options.items():
        if name in VLLM_OPTIONS:
            VLLM_OPTIONS[name].check(value)
    return {name: value for name, value in options.items() if name not in VLLM_OPTIONS and name not in ONLY_OF_SERVERS}
