"""Every option of a recent vLLM is taken, accepted without concern, or refused by name with a reason."""

import argparse
import functools

import pytest

from raycore.cli.main import build_parser
from raycore.config import ENGINE_OPTIONS
from raycore.config.vllm_table import VLLM_OPTIONS, VLLM_SERVER_FLAGS
from raycore.errors import InvalidConfig
from raycore.llm import LLM
from raycore.server.options import SERVER_OPTIONS

_ENGINE_NAMES = """
    additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
    allowed_local_media_path allowed_media_domains async_scheduling attention_backend attention_config
    aux_output_config block_size code_revision collect_detailed_traces compilation_config config_format convert
    cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
    cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
    dcp_q_replicate decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization disable_sliding_window distributed_executor_backend
    distributed_timeout_seconds download_dir dp_sync_interval dtype ec_manager_config ec_transfer_config
    elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
    enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
    enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_prefix_caching
    enable_prompt_embeds enable_return_routed_experts enable_shm_tensor_arena enable_sleep_mode
    enable_tower_connector_lora enable_trace_replay enforce_eager engram_config eplb_config
    expert_placement_strategy fail_on_environ_validation fault_tolerance_config fully_sharded_loras
    gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides hf_token
    ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config kv_offloading_backend
    kv_offloading_size kv_sharing_fast_prefill kv_transfer_config language_model_only limit_mm_per_prompt
    linear_backend load_format log_config_file log_level logging_config logits_processors logprobs_mode
    long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype lora_target_modules mamba_backend
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype
    mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size max_logprobs
    max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs max_num_batched_tokens
    max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers
    media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode
    mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_class_overrides model_impl
    model_loader_extra_config model_weights moe_backend nnodes node_rank num_gpu_blocks_override numa_bind
    numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group offload_params
    offload_prefetch_step optimization_level otlp_traces_endpoint override_generation_config
    per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
    prefix_match_unit profiler_config pt_load_map_location quantization quantization_config ray_workers_use_nsight
    reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers replayssm_buffer_len
    return_sampling_mask revision runner safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl scheduling_policy seed
    served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_tokenizer_init
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model
    spec_tokens specialize_active_lora speculative_config stream_interval structured_outputs_config
    swa_bounded_replay tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tokens_only
    trust_remote_code ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method
    video_pruning_rate watermark watermark_config weight_transfer_config worker_cls worker_extension_cls
"""
ENGINE_NAMES = _ENGINE_NAMES.split()
"""The options of vLLM 0.32's engine."""
_SERVER_NAMES = """
    allow_credentials allowed_headers allowed_methods allowed_origins anthropic_disabled_thinking_effort api_key
    api_server_count chat_template chat_template_content_format cohere_format cohere_is_reasoning_model config
    data_parallel_supervisor_port default_chat_template_kwargs disable_access_log_for_endpoints disable_fastapi_docs
    disable_uvicorn_access_log dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s enable_auto_tool_choice enable_flash_late_interaction enable_force_include_usage
    enable_log_deltas enable_log_outputs enable_offline_docs enable_per_request_metrics enable_prompt_tokens_details
    enable_request_id_headers enable_scale_out enable_server_load_tracking enable_ssl_refresh
    enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none fingerprint_mode fingerprint_value grpc
    grpc_port h11_max_header_count h11_max_incomplete_event_size headless host log_error_stack lora_modules
    max_log_len middleware port response_role return_tokens_as_token_ids root_path sse_keep_alive_interval
    ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile tool_call_parser tool_parser_plugin tool_server
    tool_strict_level trust_request_chat_template trust_request_mm_kwargs uds uvicorn_log_level
"""
SERVER_NAMES = _SERVER_NAMES.split()
"""What its server has in addition."""
_WITHOUT_CONCERN = """
    code_revision trust_remote_code
    aggregate_engine_logging all2all_backend anthropic_disabled_thinking_effort cohere_format cohere_is_reasoning_model
    compilation_config cuda_graph_sizes cudagraph_capture_sizes data_parallel_address
    data_parallel_supervisor_port
    dbo_decode_token_threshold dbo_prefill_token_threshold disable_cascade_attn
    disable_custom_all_reduce disable_frontend_multiprocessing
    disable_log_requests disable_log_stats disable_nccl_for_dp_synchronization dp_supervisor_probe_failure_threshold
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s enable_auto_tool_choice enable_batch_sharded_sampling
    enable_cumem_allocator enable_elastic_ep enable_ep_weight_filter enable_fault_tolerance
    enable_flash_late_interaction enable_flashinfer_autotune enable_prompt_tokens_details
    enable_request_id_headers enable_server_load_tracking enable_shm_tensor_arena enable_sleep_mode
    enable_trace_replay
    fail_on_environ_validation fingerprint_mode fully_sharded_loras
    hf_token ignore_patterns jit_monitor_mode jit_monitor_verbose kv_cache_metrics_sample
    log_error_stack max_cudagraph_capture_size
    max_seq_len_to_capture mm_device_do_normalize mm_hasher_algorithm optimization_level pt_load_map_location
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl skip_mm_profiling
    sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay swap_space use_fp64_gumbel use_tqdm_on_load
"""
WITHOUT_CONCERN = _WITHOUT_CONCERN.split()
"""Options of which raycore accepts every value, without effect: they choose how vLLM does what raycore does in
its own way, or set details of what is off by default."""
IN_PYTHON = {"use_tqdm_on_load"}
"""Parameters of `LLM` that aren't options."""


@functools.cache
def serve_flags() -> set[str]:
    (commands,) = (each for each in build_parser().actions if isinstance(each.choices, dict))
    actions: list[argparse.Action] = commands.choices["serve"].actions
    return {flag for action in actions for flag in action.option_strings}


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_every_engine_option_of_vllm_is_known(name: str) -> None:
    assert name in {*ENGINE_OPTIONS, *SERVER_OPTIONS, *VLLM_OPTIONS, *VLLM_SERVER_FLAGS, *IN_PYTHON}


@pytest.mark.parametrize("name", [*ENGINE_NAMES, *SERVER_NAMES])
def test_every_server_flag_of_vllm_is_known(name: str) -> None:
    assert f"--{name.replace('_', '-')}" in serve_flags()


def test_vllms_options_are_in_one_table_only() -> None:
    own = {*ENGINE_OPTIONS, *SERVER_OPTIONS}
    assert not own & {*VLLM_OPTIONS, *VLLM_SERVER_FLAGS}
    assert not VLLM_OPTIONS.keys() & VLLM_SERVER_FLAGS.keys()


@pytest.mark.parametrize("each", [*VLLM_OPTIONS.values(), *VLLM_SERVER_FLAGS.values()], ids=lambda each: each.name)
def test_unsupported_values_of_vllms_options_are_refused_with_the_reason(each) -> None:
    each.check(None)
    for value in each.values:
        each.check(value)
    if each.name in WITHOUT_CONCERN:
        return
    with pytest.raises(InvalidConfig) as raised:
        each.check("something else")
    assert str(raised.value).startswith(f"{each.name}='something else' is not supported: {each.reason}; omit it")


def test_the_vllm_options_that_accept_every_value_are_the_listed_ones() -> None:
    every = [*VLLM_OPTIONS.values(), *VLLM_SERVER_FLAGS.values()]
    found = {each.name for each in every if each.takes_any or {True, False} <= {*filter(is_bool, each.values)}}
    assert found == {*WITHOUT_CONCERN}


def is_bool(value: object) -> bool:
    return isinstance(value, bool)


def test_llm_refuses_an_unsupported_vllm_option_with_the_reason() -> None:
    with pytest.raises(InvalidConfig, match=r"ec_manager_config=.* is not supported: the encoder cache has"):
        LLM("/nowhere", ec_manager_config={"x": 1})
