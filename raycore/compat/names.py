"""vLLM's names and modules that scripts import: what they stand for in raycore, or why raycore doesn't have them.

A name is one line of `_TABLE`: the name, where raycore has it, and the modules of vLLM 0.32 that have it. Modules are
written without the leading `vllm.`; the package itself is `.`. A home `module:attribute` is for objects with another
name in raycore.
"""

from __future__ import annotations

from collections.abc import Iterator

VERSION = "0.32.0"
"""The version of vLLM whose names these are."""

COMMANDS = {
    "collect_env": "collect-env",
    "entrypoints.openai.api_server": "serve",
    "entrypoints.openai.run_batch": "run-batch",
    "entrypoints.cli.main": "",
}
"""Modules that `python -m` runs: raycore's command for each. An empty one is among the arguments."""

SUBCOMMANDS = ("serve", "chat", "complete", "bench", "run-batch", "collect-env")
"""The commands of `vllm` that `raycore` has, too."""

WHOLE = {"envs": "raycore.compat.environment"}
"""Modules that are modules of raycore."""

_TABLE = """
LLM                              raycore.llm                          . entrypoints.llm
EngineArgs                       raycore.engine_args                  . engine.arg_utils
AsyncEngineArgs                  raycore.engine_args                  . engine.arg_utils
AsyncLLM                         raycore.llm                          v1.engine.async_llm
LLMEngine                        raycore.llm_engine                   . engine.llm_engine v1.engine.llm_engine
AsyncLLMEngine                   raycore.llm:AsyncLLM                 . engine.async_llm_engine

SamplingParams                   raycore.sampling_params              . sampling_params
RequestOutputKind                raycore.sampling_params              sampling_params
RepetitionDetectionParams        raycore.sampling_params              sampling_params
StructuredOutputsParams          raycore.structured_outputs           sampling_params
PoolingParams                    raycore.pooling_params               . pooling_params
PoolingTask                      raycore.pooling_params               tasks
LoRARequest                      raycore.lora.request                 lora.request

RequestOutput                    raycore.outputs                      . outputs
CompletionOutput                 raycore.outputs                      . outputs
WeightVersionSpan                raycore.outputs                      outputs
PoolingRequestOutput             raycore.outputs                      . outputs
PoolingOutput                    raycore.outputs                      . outputs
EmbeddingRequestOutput           raycore.outputs                      . outputs
EmbeddingOutput                  raycore.outputs                      . outputs
ClassificationRequestOutput      raycore.outputs                      . outputs
ClassificationOutput             raycore.outputs                      . outputs
ScoringRequestOutput             raycore.outputs                      . outputs
ScoringOutput                    raycore.outputs                      . outputs
Logprob                          raycore.outputs                      logprobs
FlatLogprobs                     raycore.outputs                      logprobs
RequestStateStats                raycore.outputs:RequestMetrics       v1.metrics.stats
Metric                           raycore.metrics.snapshot             v1.metrics.reader
Counter                          raycore.metrics.snapshot             v1.metrics.reader
Gauge                            raycore.metrics.snapshot             v1.metrics.reader
Histogram                        raycore.metrics.snapshot             v1.metrics.reader
Vector                           raycore.metrics.snapshot             v1.metrics.reader
get_metrics_snapshot             raycore.metrics.engines              v1.metrics.reader
StatLoggerBase                   raycore.metrics.stat_loggers         v1.metrics.loggers
AggregateStatLoggerBase          raycore.metrics.stat_loggers         v1.metrics.loggers
StatLoggerFactory                raycore.metrics.stat_loggers         v1.metrics.loggers
SchedulerStats                   raycore.metrics.step_stats           v1.metrics.stats
IterationStats                   raycore.metrics.step_stats           v1.metrics.stats
PrefixCacheStats                 raycore.metrics.step_stats:CacheStats  v1.metrics.stats
MultiModalCacheStats             raycore.metrics.step_stats:CacheStats  v1.metrics.stats
FinishedRequestStats             raycore.metrics.step_stats           v1.metrics.stats
SpecDecodingStats                raycore.metrics.step_stats           v1.spec_decode.metrics
RayPrometheusStatLogger          raycore.compat.ray_metrics           v1.metrics.ray_wrappers
RayPrometheusMetric              raycore.compat.ray_metrics           v1.metrics.ray_wrappers
RayGaugeWrapper                  raycore.compat.ray_metrics           v1.metrics.ray_wrappers
RayCounterWrapper                raycore.compat.ray_metrics           v1.metrics.ray_wrappers
RayHistogramWrapper              raycore.compat.ray_metrics           v1.metrics.ray_wrappers
LogprobsOnePosition              raycore.outputs:PositionLogprobs     logprobs

PromptType                       raycore.inputs                       . inputs
TextPrompt                       raycore.inputs                       . inputs
TokensPrompt                     raycore.inputs                       . inputs
EmbedsPrompt                     raycore.inputs                       inputs
StreamingInput                   raycore.inputs                       inputs inputs.data engine.protocol
StreamingInput                   raycore.inputs                       v1.engine.async_llm
ExplicitEncoderDecoderPrompt     raycore.inputs                       inputs

BeamSearchParams                 raycore.beam_search                  sampling_params
BeamSearchOutput                 raycore.beam_search                  beam_search entrypoints.generate.beam_search.utils
BeamSearchSequence               raycore.beam_search                  beam_search entrypoints.generate.beam_search.utils

PoolerConfig                     raycore.config                       config config.pooler
AttentionConfig                  raycore.compat.settings              config config.attention
CompilationConfig                raycore.compat.settings              config config.compilation
ECTransferConfig                 raycore.compat.settings              config config.ec_transfer
EPLBConfig                       raycore.compat.settings              config config.parallel
KernelConfig                     raycore.compat.settings              config config.kernel
KVEventsConfig                   raycore.compat.settings              config config.kv_events
KVTransferConfig                 raycore.compat.settings              config config.kv_transfer
ProfilerConfig                   raycore.compat.settings              config config.profiler
ReasoningConfig                  raycore.compat.settings              config config.reasoning
SpeculativeConfig                raycore.compat.settings              config config.speculative
StructuredOutputsConfig          raycore.compat.settings              config config.structured_outputs
WeightTransferConfig             raycore.compat.settings              config config.weight_transfer

WeightTransferInitRequest        raycore.parts.weights.control.requests      distributed.weight_transfer.base
WeightTransferUpdateRequest      raycore.parts.weights.control.requests      distributed.weight_transfer.base
NCCLWeightTransferEngine         raycore.compat.weight_transfer       distributed.weight_transfer.nccl_engine
NCCLTrainerSendWeightsArgs       raycore.compat.weight_transfer       distributed.weight_transfer.nccl_engine
NCCLWeightTransferInitInfo       raycore.compat.weight_transfer       distributed.weight_transfer.nccl_engine
NCCLWeightTransferUpdateInfo     raycore.compat.weight_transfer       distributed.weight_transfer.nccl_engine
IPCWeightTransferEngine          raycore.compat.weight_transfer       distributed.weight_transfer.ipc_engine
IPCTrainerSendWeightsArgs        raycore.compat.weight_transfer       distributed.weight_transfer.ipc_engine
IPCWeightTransferInitInfo        raycore.compat.weight_transfer       distributed.weight_transfer.ipc_engine
DEFAULT_PACKED_BUFFER_SIZE_BYTES raycore.compat.weight_transfer       distributed.weight_transfer.packed_tensor
DEFAULT_PACKED_NUM_BUFFERS       raycore.compat.weight_transfer       distributed.weight_transfer.packed_tensor

LogitsProcessor          raycore.sampling.logits_processors  v1.sample.logits_processor
LogitsProcessor          raycore.sampling.logits_processors  v1.sample.logits_processor.interface
AdapterLogitsProcessor   raycore.sampling.logits_processors  v1.sample.logits_processor
RequestLogitsProcessor   raycore.sampling.logits_processors  v1.sample.logits_processor
BatchUpdate              raycore.sampling.logits_processors  v1.sample.logits_processor
BatchUpdate              raycore.sampling.logits_processors  v1.sample.logits_processor.interface
MoveDirectionality       raycore.sampling.logits_processors  v1.sample.logits_processor
MoveDirectionality       raycore.sampling.logits_processors  v1.sample.logits_processor.interface
process_dict_updates     raycore.compat.processors           v1.sample.logits_processor
process_dict_updates     raycore.compat.processors           v1.sample.logits_processor.builtin
VllmConfig               raycore.sampling.processor_config:LogitsProcessorConfig  config

EngineDeadError                  raycore.errors                       v1.engine.exceptions
EngineGenerateError              raycore.errors:RequestFailed         v1.engine.exceptions
GenerationError                  raycore.errors:RequestFailed         exceptions
VLLMError                        raycore.errors:RaycoreError          exceptions
VLLMClientError                  raycore.errors:InvalidInput          exceptions
VLLMValidationError              raycore.errors:InvalidInput          exceptions

KVCacheEvent                     raycore.parts.transfers.connectors.events           distributed.kv_events
BlockStored                      raycore.parts.transfers.connectors.events           distributed.kv_events
BlockRemoved                     raycore.parts.transfers.connectors.events           distributed.kv_events
AllBlocksCleared                 raycore.parts.transfers.connectors.events           distributed.kv_events
KVEventBatch                     raycore.parts.transfers.connectors.events           distributed.kv_events

ChatCompletionRequest            raycore.server.protocol              entrypoints.openai.chat_completion.protocol
CompletionRequest                raycore.server.protocol              entrypoints.openai.completion.protocol
AnthropicMessagesRequest raycore.server.dialects.messages.protocol:MessagesRequest entrypoints.anthropic.protocol
AnthropicCountTokensRequest raycore.server.dialects.messages.protocol:CountTokensRequest entrypoints.anthropic.protocol
ResponsesRequest                 raycore.server.dialects.responses.protocol    entrypoints.openai.responses.protocol
GenerateRequest raycore.server.dialects.tokens.protocol entrypoints.scale_out.token_in_token_out.protocol
StreamOptions                    raycore.server.protocol              entrypoints.generate.base.protocol
TokenizeChatRequest              raycore.server.protocol:TokenizeRequest  entrypoints.serve.tokenize.protocol
TokenizeCompletionRequest        raycore.server.protocol:TokenizeRequest  entrypoints.serve.tokenize.protocol
DetokenizeRequest                raycore.server.protocol              entrypoints.serve.tokenize.protocol

ShardedStateLoader               raycore.compat.sharded_state         model_executor.model_loader

main                             raycore.cli.main                     entrypoints.cli.main
make_arg_parser                  raycore.compat.server                entrypoints.openai.api_server
make_arg_parser                  raycore.compat.server                entrypoints.openai.cli_args
make_arg_parser                  raycore.compat.server                entrypoints.launchers.cli_args
validate_parsed_serve_args       raycore.compat.server                entrypoints.openai.api_server
validate_parsed_serve_args       raycore.compat.server                entrypoints.openai.cli_args
validate_parsed_serve_args       raycore.compat.server                entrypoints.launchers.cli_args
run_server                       raycore.compat.server                entrypoints.openai.api_server
cli_env_setup                    raycore.compat.server                entrypoints.utils

current_platform                 raycore.compat.platform              platforms
Platform                         raycore.compat.platform              platforms platforms.interface
init_logger                      raycore.compat.utilities             logger
get_tokenizer                    raycore.compat.utilities             tokenizers transformers_utils.tokenizer
cached_get_tokenizer             raycore.compat.utilities             tokenizers
TokenizerLike                    raycore.text.tokenizer:Tokenizer     tokenizers
cleanup_dist_env_and_memory      raycore.compat.utilities             distributed distributed.parallel_state
FlexibleArgumentParser           raycore.compat.arguments             utils.argparse_utils utils
random_uuid                      raycore.compat.utilities             utils
get_ip                           raycore.compat.utilities             utils.network_utils utils
get_open_port                    raycore.compat.utilities             utils.network_utils utils
get_open_ports_list              raycore.compat.utilities             utils.network_utils
join_host_port                   raycore.compat.utilities             utils.network_utils
split_host_port                  raycore.compat.utilities             utils.network_utils
set_ulimit                       raycore.compat.utilities             utils.system_utils
print_embeddings                 raycore.compat.utilities             utils.print_utils
EMBED_DTYPES                     raycore.compat.tensors               utils.serial_utils
ENDIANNESS                       raycore.compat.tensors               utils.serial_utils
Endianness                       raycore.compat.tensors               utils.serial_utils
tensor2base64                    raycore.compat.tensors               utils.serial_utils
tensor2binary                    raycore.compat.tensors               utils.serial_utils
binary2tensor                    raycore.compat.tensors               utils.serial_utils
MetadataItem                     raycore.compat.tensors               entrypoints.pooling.utils
build_metadata_items             raycore.compat.tensors               entrypoints.pooling.utils
decode_pooling_output            raycore.compat.tensors               entrypoints.pooling.utils
ToolParser                       raycore.compat.parsers               tool_parsers tool_parsers.abstract_tool_parser
ToolParserManager                raycore.compat.parsers               tool_parsers tool_parsers.abstract_tool_parser
ReasoningParser                  raycore.compat.parsers               reasoning reasoning.abs_reasoning_parsers
ReasoningParserManager           raycore.compat.parsers               reasoning reasoning.abs_reasoning_parsers
BaseThinkingReasoningParser      raycore.compat.parsers               reasoning.basic_parsers
DeltaFunctionCall                raycore.compat.parsers               entrypoints.generate.base.protocol
DeltaMessage                     raycore.compat.parsers               entrypoints.generate.base.protocol
DeltaToolCall                    raycore.compat.parsers               entrypoints.generate.base.protocol
ExtractedToolCallInformation     raycore.compat.parsers               entrypoints.generate.base.protocol
FunctionCall                     raycore.compat.parsers               entrypoints.generate.base.protocol
ToolCall                         raycore.compat.parsers               entrypoints.generate.base.protocol
UsageContext                     raycore.compat.utilities             usage.usage_lib
load_chat_template               raycore.text.template_file:read_chat_template  renderers.chat_utils
fetch_image                      raycore.compat.media                 multimodal.utils
encode_image_base64              raycore.compat.media                 multimodal.utils
encode_image_url                 raycore.compat.media                 multimodal.utils
convert_image_mode               raycore.compat.media                 multimodal.image
__version__                      raycore.compat.names:VERSION         version
"""

_INNER = "it is a part of vLLM's engine that raycore builds in its own way (docs/architecture.md)"
_MODELS = "raycore's models are its own, and plugins add families (docs/plugins.md)"

REASONS = {
    "": "it is neither a part of raycore's interface, nor known to be used by scripts",
    "ModelRegistry": _MODELS,
    "assets": "vLLM downloads these samples of images, videos and sounds, and nothing is downloaded: open a file",
    "benchmarks": "the benchmarks of servers and engines are commands: raycore bench",
    "compilation": "models aren't compiled",
    "config.set_current_vllm_config": "no configuration of raycore is global",
    "config.get_current_vllm_config": "no configuration of raycore is global",
    "distributed": "raycore's ranks and workers are Ray actors with channels of their own (docs/architecture/rpc.md)",
    "distributed.kv_transfer": "connectors have raycore's interface (docs/kv-transfer.md)",
    "distributed.weight_transfer": "weight_transfer_config names a way, and trainers send by NCCLWeightTransferEngine, "
    "IPCWeightTransferEngine, or the functions of raycore.parts.weights.transfer.trainer (docs/weight-updates.md)",
    "engine": _INNER,
    "entrypoints": "raycore's server is built in its own way (docs/architecture/server.md); start it with raycore "
    "serve",
    "entrypoints.openai.api_server.build_app": "raycore.server.build_app(engine) is the application of a server",
    "forward_context": _INNER,
    "initialize_ray_cluster": "an engine joins or starts Ray by itself (docs/engines-in-actors.md)",
    "model_executor": _MODELS,
    "multimodal.audio": "raycore has no models that hear",
    "multimodal.media.audio": "raycore has no models that hear",
    "multimodal.media.video": "raycore has no models of videos",
    "multimodal.utils.encode_audio_base64": "raycore has no models that hear",
    "multimodal.utils.encode_audio_url": "raycore has no models that hear",
    "multimodal.utils.fetch_audio": "raycore has no models that hear",
    "multimodal.utils.encode_video_base64": "raycore has no models of videos",
    "multimodal.utils.encode_video_url": "raycore has no models of videos",
    "multimodal.utils.fetch_video": "raycore has no models of videos",
    "multimodal.video": "raycore has no models of videos",
    "platforms": "raycore runs on CPUs and on NVIDIA's GPUs, and has no plugins for devices",
    "plugins": "raycore's plugins have other groups of entry points (docs/plugins.md)",
    "sampling_params.GuidedDecodingParams": "removed by vLLM: use StructuredOutputsParams",
    "transformers_utils.configs": _MODELS,
    "usage": "raycore reports its use to nobody",
    "v1": _INNER,
    "v1.metrics.loggers": "get_metrics() and /metrics have an engine's metrics, and do_log_stats() logs its throughput",
    "v1.watermarking": "raycore has no watermarks",
    "worker": _INNER,
}
"""Why raycore doesn't have modules and names. What is said of a module holds for all that is in it."""


def _rows() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for line in filter(None, _TABLE.splitlines()):
        name, home, *places = line.split()
        yield name, home, tuple("" if place == "." else place for place in places)


def _names() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"": {}}
    for name, home, places in _rows():
        for place in places:
            found.setdefault(place, {})[name] = home
    return found


NAMES = _names()
"""By module and name: where raycore has it."""


def _modules() -> frozenset[str]:
    found: set[str] = set()
    for name in (*NAMES, *COMMANDS, *WHOLE):
        parts = name.split(".")
        found.update(".".join(parts[: count + 1]) for count in range(len(parts)))
    return frozenset(found - {""})


MODULES = _modules()
"""All modules, with those that only have others."""


def reason(name: str) -> str:
    """Why raycore doesn't have a module or a name of vLLM, which is given without the leading `vllm.`."""
    parts = name.split(".")
    known = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((REASONS[each] for each in known if each in REASONS), REASONS[""])
