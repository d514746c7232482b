"""The options of `LLM(...)` for type checkers and editors. Written by docs/write_options.py."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class VllmOptions(TypedDict, total=False):
    """Options of vLLM's that have no effect, and are refused where they ask for something."""

    pipeline_parallel_size: object
    decode_context_parallel_size: object
    prefill_context_parallel_size: object
    distributed_executor_backend: object
    data_parallel_backend: object
    ray_workers_use_nsight: object
    max_parallel_loading_workers: object
    disable_custom_all_reduce: object
    enable_eplb: object
    runner: object
    convert: object
    task: object
    pooler_config: object
    override_pooler_config: object
    trust_remote_code: object
    logits_processors: object
    model_impl: object
    revision: object
    code_revision: object
    tokenizer_revision: object
    hf_token: object
    download_dir: object
    hf_config_path: object
    hf_overrides: object
    config_format: object
    model_loader_extra_config: object
    ignore_patterns: object
    safetensors_load_strategy: object
    tokenizer_mode: object
    skip_tokenizer_init: object
    generation_config: object
    override_generation_config: object
    rope_scaling: object
    rope_theta: object
    disable_sliding_window: object
    quantization: object
    kv_cache_dtype: object
    calculate_kv_scales: object
    swap_space: object
    cpu_offload_gb: object
    kv_offloading_size: object
    prefix_caching_hash_algo: object
    enable_sleep_mode: object
    enable_chunked_prefill: object
    max_num_partial_prefills: object
    max_long_partial_prefills: object
    async_scheduling: object
    scheduler_cls: object
    num_lookahead_slots: object
    speculative_config: object
    speculative_model: object
    enable_lora: object
    lora_modules: object
    max_loras: object
    max_lora_rank: object
    max_cpu_loras: object
    enable_prompt_embeds: object
    limit_mm_per_prompt: object
    mm_processor_kwargs: object
    allowed_local_media_path: object
    allowed_media_domains: object
    kv_transfer_config: object
    kv_events_config: object
    max_seq_len_to_capture: object
    cuda_graph_sizes: object
    compilation_config: object
    disable_log_stats: object
    guided_decoding_backend: object
    show_hidden_metrics_for_version: object


class EngineOptions(VllmOptions, total=False):
    """Options of an engine beside its model and tokenizer."""

    dtype: str | Any
    """Numbers that weights and activations are computed in. auto: the checkpoint's, or float32 where the device lacks
    it, as each worker finds. Default: auto."""
    max_model_len: int | None
    """Tokens of a prompt and its output together, at most. Default: as many as the checkpoint has positions."""
    seed: int
    """Seed of the requests that have none of their own. Default: 0."""
    enforce_eager: bool
    """Has no effect: nothing is compiled yet, so every model runs eagerly. For vLLM's scripts. Default: True."""
    load_format: Literal["auto", "dummy"]
    """dummy: fill the weights with seeded random numbers instead of reading them. Default: auto."""
    batch_invariant: bool
    """Compute every token with the same arithmetic whatever else is in its batch: its logits have the same bits alone,
    in a crowd, from a cached prefix, and after a preemption. Slower. Default: False."""
    prepare_structured_outputs: bool
    """Load what structured outputs need at startup. Otherwise the first request that has them stops each client and
    worker for a second or two if the vocabulary is large. Default: False."""
    device: Literal["auto", "cpu", "cuda"]
    """What workers compute on. auto: the CPU until the GPU path has been tested on GPUs, with a warning if the cluster
    has GPUs. Default: auto."""
    engine_name: str | None
    """Name by which `raycore status` and `raycore scale` find the engine. Default: a random one."""
    tensor_parallel_size: int
    """Workers of each rank, which split the model. Default: 1."""
    data_parallel_size: int
    """Ranks: copies of the model. Default: 1."""
    placement_strategy: Literal["strict", "fill", "span"]
    """How ranks are placed on nodes. strict: no rank spans nodes, and every node in use has the same number of ranks.
    fill: no rank spans nodes, and one node is filled after the other. span: as fill, but a rank that no node can hold
    is spread over several. Default: fill."""
    wait_for_nodes_s: float
    """Seconds to wait for an autoscaler to add nodes. 0: fail at once if the cluster can never fit the ranks. Default:
    0."""
    worker_cls: str | type[Any] | None
    """package.module.Class of a Worker subclass. Default: raycore's own."""
    enable_expert_parallel: bool
    """Spread whole experts over the workers of all ranks, instead of splitting each within its rank. Default: False."""
    dp_sync_interval: int
    """Steps between two looks of ranks that share experts for the end of their common work. Default: 1."""
    block_size: int
    """Tokens in a block of the KV cache. Default: 16."""
    enable_prefix_caching: bool
    """Keep the KV cache of prompts, for prompts that begin in the same way. Default: True."""
    gpu_memory_utilization: float
    """Share of the device's memory for weights and KV cache together. Default: 0.9."""
    num_gpu_blocks_override: int | None
    """Blocks of the KV cache. Default: as many as fit."""
    kv_cache_memory_bytes: int | None
    """Bytes of each worker's share of the KV cache. Default: profiled at startup."""
    max_num_seqs: int | None
    """Sequences that one rank runs at a time, at most. Default: 256, or max_num_batched_tokens if that is less."""
    max_num_batched_tokens: int | None
    """Tokens that one rank computes in a step, at most. Default: 2048, or max_num_seqs if that is more."""
    scheduling_policy: Literal["fcfs", "priority"]
    """Which waiting request runs next. fcfs: the first that came. priority: the one with the lowest number. Default:
    fcfs."""
    long_prefill_token_threshold: int
    """Tokens of one prompt in a step, at most. 0: only max_num_batched_tokens limits them. Default: 0."""
    executor_backend: Literal["inline", "ray"] | None
    """Where workers run. inline: the only worker of a rank in the engine's process. ray: each in an actor. Default:
    inline if tensor_parallel_size is 1, else ray."""
    executor_transport: Literal["channel", "actor_call"]
    """How an engine calls its workers. channel: through shared memory. actor_call: with calls of Ray's. Default:
    channel."""
    executor_wait: Literal["adaptive", "spin"]
    """How processes wait at a channel. adaptive: spin for spin_window_s, then sleep. spin: never sleep. Default:
    adaptive."""
    spin_window_s: float
    """Seconds that a process spins at a channel before it sleeps. Default: 0.0001."""
    channel_capacity_bytes: int
    """Bytes that a channel holds. A larger message is sent in parts. Default: 1048576."""
    num_threads: int | None
    """Compute threads of each worker. Default: the cores of its node over the workers there."""
    init_timeout_s: float
    """Seconds for a rank to come up, weights and all. It fails after that. Default: 600."""
    execute_timeout_s: float
    """Seconds for the workers' reply to one call, such as a step. The rank fails after that. Default: 300."""
    shutdown_timeout_s: float
    """Seconds for workers to stop when the engine does. They are killed after that. Default: 5."""
    max_request_replays: int
    """How often a request may go on elsewhere after its rank has failed. It fails alone, the next time. Default: 2."""
    step_timeout_s: float
    """Seconds for one step. A rank that takes longer, or does not answer for as long, is killed and replaced. Default:
    60."""
    drain_timeout_s: float
    """Seconds in which a rank that has to leave may finish its requests. Others go on with what is left. Default:
    30."""
    max_rank_restarts: int
    """How often a rank may be started again within restart_window_s before it is given up. Default: 5."""
    restart_window_s: float
    """Seconds over which the starts of a rank are counted. Default: 300."""
    restart_backoff_s: float
    """Seconds before the second start of a rank within crash_loop_s. They double with each further one. The first start
    is at once. Default: 0.5."""
    crash_loop_s: float
    """Seconds within which starts of a rank are taken for a crash loop. Default: 30."""
    max_restart_backoff_s: float
    """Seconds between two starts of a rank, at most. Default: 30."""
    standby_delay_s: float | None
    """Seconds after which standby processes start beside ranks that have come up. They cost memory, and make replacing
    a rank much faster. None: no standbys. Default: 8."""
    placement_timeout_s: float
    """Seconds to wait for resources that others hold, when ranks are placed. Default: 60."""
