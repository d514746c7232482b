"""Why raycore lacks names of vLLM's, or differs, where the code itself doesn't say.

The keys are patterns of entries' keys, as the shell has them. The first one that matches counts.
"""

from __future__ import annotations

_CHECKSUMS = "use collective_rpc with weights_checksum"
_INNER = "it is a part of vLLM's engine that raycore builds in its own way"
_SETTINGS = "settings are what was given: a dict with attributes"
_CONSTRUCTED = "engines are constructed from options: AsyncLLM(model, ...), or from_engine_args()"
_CHECKED = "the constructor and the engine check, and the engine knows the model's tokens"
_VIDEO = "raycore has no models of videos"
_SOUND = "raycore has no models that hear"
_TIERS = "it is about a connector of vLLM's: for raycore's, see vllm:prompt_tokens_cached_by_source"
_NOT_MEASURED = "raycore doesn't measure it"
_DIFFUSION = "raycore has no diffusion models"
_EVENT = "raycore's caches have nothing that it would say"
_ERROR = "a request that fails raises RequestFailed"

_DATASET = "the sets of prompts are random, sharegpt, custom, sonnet and prefix_repetition: files that are there"
_RERANKING = "only texts that are continued are measured"
_LOAD = "requests arrive by --request-rate and --burstiness"
_PLOTS = "results are numbers, and files of them"

REASONS: dict[str, str] = {
    # Python
    "python/*EngineArgs.create_*_config()": "a configuration has other parts: create_engine_config() returns all of it",
    "python/*EngineArgs.get_batch_defaults()": _INNER,
    "python/*EngineArgs.validate_tensorizer_args()": "weights of tensorizer aren't read",
    "python/*EngineArgs.served_model_name": "taken, without effect: it is an option of the server",
    "python/AsyncEngineArgs.add_cli_args(async_args_only)": "flags of servers alone are those of raycore serve",
    "python/*.set_weight_version()": "use update_weight_version()",
    "python/*.compute_weight_checksums()": _CHECKSUMS,
    "python/*.release_kv_cache_memory()": "use sleep(level=1) and wake_up(tags=['weights'])",
    "python/AsyncLLM.checkpoint_*": "processes of raycore can't be frozen",
    "python/AsyncLLM(*)": _CONSTRUCTED,
    "python/LLMEngine(*)": _CONSTRUCTED,
    "python/LLMEngine.add_request(prompt_text)": "outputs have the prompt's text if it was given as text",
    "python/LLMEngine.do_log_stats_with_interval()": "use do_log_stats()",
    "python/LLMEngine.has_unfinished_requests_dp()": _INNER,
    "python/*.from_vllm_config()": _CONSTRUCTED,
    "python/AsyncLLM.add_request(prompt_text)": "outputs have the prompt's text if it was given as text",
    "python/AsyncLLM.check_admission()": "the engine takes all requests",
    "python/AsyncLLM.get_num_queued_tokens()": "the engine takes all requests",
    "python/AsyncLLM.get_kv_event_sources()": "rank r publishes at the endpoint's port plus r",
    "python/AsyncLLM.notify_kv_transfer_request_rejected()": "connectors have raycore's interface",
    "python/AsyncLLM.handle_fault()": "lost ranks are always replaced",
    "python/AsyncLLM.get_status()": "use `raycore status`",
    "python/*(reasoning_ended)": "the server parses the reasoning",
    "python/*(reasoning_parser_kwargs)": "the server parses the reasoning",
    "python/*(session_id)": "the prefix cache needs no sessions",
    "python/*(kv_hints)": "the prefix cache takes no hints",
    "python/SamplingParams.prompt_logprob_*": "prompt_logprobs are of all positions and of the most likely tokens",
    "python/SamplingParams.output_text_buffer_length": _INNER,
    "python/SamplingParams.skip_reading_prefix_cache": "raycore decides it",
    "python/PoolingParams.late_interaction_params": "scores of late interaction are computed from token_embed",
    "python/SamplingParams.routed_experts_prompt_start": "outputs have the experts of all tokens",
    "python/SamplingParams.all_stop_token_ids": _CHECKED,
    "python/SamplingParams.eos_token_id": _CHECKED,
    "python/SamplingParams.bad_words_token_ids": _CHECKED,
    "python/SamplingParams.for_sampler_warmup()": _INNER,
    "python/SamplingParams.update_from_*": _CHECKED,
    "python/SamplingParams.verify()": _CHECKED,
    "python/PoolingParams.*": _CHECKED,
    "python/StructuredOutputsParams.disable_additional_properties": "the schema says it",
    "python/StructuredOutputsParams.whitespace_pattern": "white space is any, or none: disable_any_whitespace",
    "python/StructuredOutputsParams.all_*": _CHECKED,
    "python/*RequestOutput(error)": _ERROR,
    "python/*.from_base(*)": "it takes the same, in another form: raycore calls it itself",
    "python/TokensPrompt.prompt_token_offsets": "nothing needs to know where tokens begin in a text",
    "python/BeamSearchParams.watermarking": "raycore has no watermarks",
    "python/BeamSearchSequence.*": _INNER,
    "python/RequestOutput.add()": _INNER,
    "python/FlatLogprobs.*": "log probabilities of outputs are only read",
    "python/RequestStateStats.*": _NOT_MEASURED,
    "python/PoolerConfig.*()": _INNER,
    "python/*Config.compute_hash()": "nothing that is compiled is kept",
    "python/KVTransferConfig.*": _SETTINGS,
    "python/ECTransferConfig.ec_connector_module_path": "connectors of embeddings are raycore's own",
    "python/ECTransferConfig.*": _SETTINGS,
    "python/ProfilerConfig.*": _SETTINGS,
    "python/SpeculativeConfig.target_*": "the engine's options are the target's",
    "python/SpeculativeConfig.draft_*_config": "the settings are the draft's",
    "python/SpeculativeConfig.*": _INNER,
    "python/BlockStored.*": _EVENT,
    "python/BlockRemoved.*": _EVENT,
    # commands
    "flag/run-batch --output-tmp-dir": "the output is written beside its target",
    "flag/run-batch --enable-metrics": "only servers have metrics",
    "flag/run-batch --url": "only servers have metrics",
    "flag/bench startup": "use benchmarks/startup.py",
    "flag/bench * --timed-trace-*": _DATASET,
    "flag/bench * --spec-bench-*": _DATASET,
    "flag/bench * --speed-bench-*": _DATASET,
    "flag/bench * --blazedit-*": _DATASET,
    "flag/bench * --bfcl-*": _DATASET,
    "flag/bench * --asr-*": _DATASET,
    "flag/bench * --random-mm-*": _DATASET,
    "flag/bench * --hf-subset": _DATASET,
    "flag/bench * --hf-split": _DATASET,
    "flag/bench * --hf-name": _DATASET,
    "flag/bench * --hf-output-len": _DATASET,
    "flag/bench * --random-batch-size": _RERANKING,
    "flag/bench * --no-reranker": _RERANKING,
    "flag/bench * --enable-multimodal-chat": _DATASET,
    "flag/bench * --custom-ensure-client-side-data": _DATASET,
    "flag/bench * --skip-tokenizer-init": "tokens are counted with the model's tokenizer",
    "flag/bench * --use-beam-search": "it has no times of tokens",
    "flag/bench * --profile": "profiles are calls: start_profile()",
    "flag/bench serve --probe-request-rate": _LOAD,
    "flag/bench serve --self-timed": _LOAD,
    "flag/bench serve --plot-*": _PLOTS,
    "flag/bench serve --timeline-*": _PLOTS,
    "flag/bench throughput --hf-*": "only raycore is measured: vLLM's own command measures the others",
    "flag/bench throughput --prequeue-requests": "all requests are submitted at once",
    "flag/bench throughput --lora-*": "use benchmarks/lora.py",
    "flag/bench throughput --prefix-len": "the prefixes' length is --random-prefix-len, or that of prefix_repetition",
    # endpoints
    "endpoint/GET /kv_event_sources": "rank r publishes at the endpoint's port plus r",
    "endpoint/POST /v1/systemone": "raycore has no structured decisions",
    "http/StructuredDecisionRequest*": "raycore has no structured decisions",
    "endpoint/POST /release_kv_cache_memory": "use /sleep and /wake_up?tags=weights",
    "endpoint/POST /weight_checker": _CHECKSUMS,
    "endpoint/POST /generative_scoring": "use completions with logprobs",
    "http/GenerativeScoringRequest*": "use completions with logprobs",
    "endpoint/POST /v1/audio/*": _SOUND,
    "http/TranscriptionRequest*": _SOUND,
    "http/TranslationRequest*": _SOUND,
    # fields
    "http/IOProcessorRequest*": "raycore has no plugins that process requests",
    "http/EmbeddingBatchChatRequest*": "one of several forms of a request: input takes several conversations",
    "http/EmbeddingChatInputRequest*": "one of several forms of a request: input takes conversations",
    "http/EmbeddingBatchChatInputRequest*": "one of several forms of a request: input takes several conversations",
    # metrics
    "metric/vllm:admission_rejections": "the engine takes all requests, and http_requests_total counts refusals",
    "metric/vllm:corrupted_requests": _NOT_MEASURED,
    "metric/vllm:diffusion*": _DIFFUSION,
    "metric/vllm:estimated_*": _NOT_MEASURED,
    "metric/vllm:hf3fs_*": _TIERS,
    "metric/vllm:hisparse_*": _TIERS,
    "metric/vllm:kv_block_*": _NOT_MEASURED,
    "metric/vllm:kv_offload_*": _TIERS,
    "metric/vllm:mooncake_*": _TIERS,
    "metric/vllm:nixl_*": _TIERS,
    "metric/vllm:simple_kv_offload_*": _TIERS,
    "metric/vllm:spec_decode": "it isn't the name of a metric, but the beginning of some",
    "metric/vllm:tool_call_parser_invocations_total": _NOT_MEASURED,
    "metric/vllm:watermark_requests": "raycore has no watermarks",
    "metric/vllm:websocket_*": "the server speaks HTTP",
}
