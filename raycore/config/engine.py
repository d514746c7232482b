"""The whole configuration, which all processes of an engine share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from raycore.cache_layout import CacheLimits
from raycore.checkpoint.hub_download import complete_snapshot
from raycore.checkpoint.sharded_state import Division, check_saved_state, checked_pattern
from raycore.checkpoint.stages import Stage
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import has_weight_files, stored_tensors
from raycore.config.cache import CacheConfig
from raycore.config.executor import ExecutorConfig
from raycore.config.logits_processors import ProcessorClass, parse_logits_processors
from raycore.config.model import ModelConfig
from raycore.config.parallel import ParallelConfig
from raycore.config.profiler import ProfilerConfig, parse_profiler_config
from raycore.config.recovery import RecoveryConfig
from raycore.config.scheduler import SchedulerConfig
from raycore.config.states import StateRows
from raycore.errors import InitializationError
from raycore.models.spec import ModelSpec
from raycore.options.declared import json_option, option
from raycore.parts.adapters.config import LoRAConfig
from raycore.parts.constraints.config.reasoning import ReasoningConfig, parse_reasoning_config
from raycore.parts.constraints.config.structured_outputs import StructuredOutputsConfig, parse_structured_outputs_config
from raycore.parts.drafts.config.drafter import DrafterConfig
from raycore.parts.drafts.config.speculative import SpeculativeConfig, parse_speculative_config
from raycore.parts.images.config import EMBEDDED_PIECE_TOKENS, EncoderLimits, MultiModalConfig
from raycore.parts.pooling.config import PoolingConfig
from raycore.parts.routed_experts.config import RoutedExpertsConfig
from raycore.parts.traces.config import TracesConfig
from raycore.parts.transfers.config.ec_transfer import ECTransferConfig, parse_ec_transfer_config
from raycore.parts.transfers.config.kv_transfer import (
    KVEventsConfig,
    KVTransferConfig,
    parse_kv_events_config,
    parse_kv_transfer_config,
)
from raycore.parts.weights.config import WeightTransferConfig, parse_weight_transfer_config
from raycore.plugins import Plugins
from raycore.same_copy import seal, unseal

_MAX_KEPT_EMBEDS = 256 << 20


class EngineConfig(msgspec.Struct, frozen=True):
    """The configuration that an engine, its workers and its clients share."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    executor: ExecutorConfig
    recovery: RecoveryConfig = RecoveryConfig()
    lora: LoRAConfig = LoRAConfig()
    pooling: PoolingConfig = PoolingConfig()
    routed_experts: RoutedExpertsConfig = RoutedExpertsConfig()
    multimodal: MultiModalConfig = MultiModalConfig()
    traces: TracesConfig = TracesConfig()
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option(
            "Device that workers compute on. auto: cuda if the cluster has GPUs and torch is built with CUDA, "
            "else cpu.",
            is_common=True,
        ),
    ] = "auto"
    """Ranks and workers get `cpu` or `cuda`: `auto` is resolved once, when the engine starts."""
    engine_name: Annotated[
        Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]+\Z")] | None,
        option(
            "Name of the engine, for `raycore status --name` and `raycore scale --name`. A second engine with the same "
            "name is refused in the same Ray cluster. Ray Serve adds each replica's id.",
            default="random",
            expected="a name of letters, digits, '-', '_' and '.'",
        ),
    ] = None
    profiler_config: Annotated[
        ProfilerConfig | None,
        json_option(
            "Lets start_profile() and stop_profile() profile steps with torch's profiler. Keys as in vLLM: profiler "
            "(torch), torch_profiler_dir, torch_profiler_with_stack, torch_profiler_record_shapes, "
            "torch_profiler_with_memory, torch_profiler_with_flops, torch_profiler_use_gzip, delay_iterations and "
            "max_iterations.",
            convert=parse_profiler_config,
        ),
    ] = None
    weight_transfer_config: Annotated[
        WeightTransferConfig | None,
        json_option(
            "Lets a trainer change the weights of the running engine with update_weights(). Keys: backend, by which "
            "its tensors come (nccl: torch.distributed, which is Gloo on CPUs; ipc: memory of the node or GPU; ray: "
            "objects in Ray's store; disk: safetensors files), and timeout_s, how long workers wait for it.",
            convert=parse_weight_transfer_config,
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        json_option(
            "Speculative decoding: a request's next tokens are guessed, and one step verifies several. Outputs stay "
            "the same. Keys as in vLLM: method (ngram, suffix, draft_model, eagle3 or mtp), num_speculative_tokens, "
            "num_speculative_tokens_per_batch_size, model, draft_tensor_parallel_size, max_model_len, "
            "prompt_lookup_min, prompt_lookup_max, and those that begin with suffix_decoding_. Steps have guesses only "
            "while they pay, unless num_speculative_tokens_per_batch_size says how many.",
            flags=("-sc", "--speculative-config"),
            convert=parse_speculative_config,
        ),
    ] = None
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        json_option(
            "Where keys and values of prefixes live besides the KV cache: a KV connector. Keys as in vLLM: "
            "kv_connector (OffloadConnector, PeersConnector, DisaggregationConnector, or the path of a class), "
            "kv_role, engine_id, kv_connector_extra_config, kv_connector_module_path and kv_load_failure_policy "
            "(recompute or fail).",
            convert=parse_kv_transfer_config,
        ),
    ] = None
    kv_events_config: Annotated[
        KVEventsConfig | None,
        json_option(
            "Tells other processes which blocks the prefix cache stores and removes. Keys as in vLLM: "
            "enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, buffer_steps, hwm, "
            "max_queue_size and topic. Each rank publishes at the endpoint's port plus its number.",
            convert=parse_kv_events_config,
        ),
    ] = None
    ec_transfer_config: Annotated[
        ECTransferConfig | None,
        json_option(
            "Keeps embeddings of images outside the encoder cache. Keys as in vLLM: ec_connector (ECStoreConnector, "
            "or a class of one's own), ec_role (ec_producer, which only encodes images, ec_consumer or ec_both), "
            "engine_id and ec_connector_extra_config, with cpu_bytes_to_use, path and max_path_bytes.",
            convert=parse_ec_transfer_config,
        ),
    ] = None
    logits_processors: Annotated[
        tuple[ProcessorClass, ...],
        option(
            "Classes that change logits before tokens are picked, as vLLM's: subclasses of "
            "raycore.sampling.logits_processors.LogitsProcessor, or their paths as module:Class. Requests give them "
            "arguments in extra_args.",
            metavar="MODULE:CLASS",
            expected="a list of classes, or of their paths as module:Class",
            convert=parse_logits_processors,
        ),
    ] = ()
    reasoning_config: Annotated[
        ReasoningConfig | None,
        json_option(
            "How the model writes its reasoning, for requests with thinking_token_budget. Keys as in vLLM: "
            "reasoning_parser, whose tags these are, reasoning_start_str and reasoning_end_str. Servers with "
            "--reasoning-parser need none. In Python, reasoning_parser=... is short for this.",
            convert=parse_reasoning_config,
        ),
    ] = None
    structured_outputs_config: Annotated[
        StructuredOutputsConfig | None,
        json_option(
            "Settings of structured outputs. Keys as in vLLM: disable_any_whitespace, with which JSON of all requests "
            "has no white space between its parts, reasoning_parser and reasoning_parser_plugin, which stand for the "
            "options of these names. The others have no effect.",
            convert=parse_structured_outputs_config,
        ),
    ] = None
    drafter: DrafterConfig | None = None
    """The model that `speculative_config` names. None: guesses need no model."""
    plugins: Plugins = Plugins()
    """What installed packages add to raycore in all processes of the engine."""
    log_level: int = logging.WARNING
    """Log level of the ranks' processes."""

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps an engine starts before it takes the first one's result.

        Engines that speculate start one for each stage, unless they are asked for more. Guesses are then made, and
        chosen, when all tokens are there.
        """
        if self.scheduler.max_concurrent_batches is not None:
            return self.scheduler.max_concurrent_batches
        is_on, num_stages = self.scheduler.async_scheduling, self.parallel.pipeline_parallel_size
        if self.speculative_config is not None and not is_on:
            return num_stages
        if num_stages > 1:
            # each stage computes a step, and one more is planned, so that no stage waits for a plan
            return num_stages + (is_on is not False)
        return 2 if (self.device == "cuda" if is_on is None else is_on) else 1

    @property
    def has_logits_processors(self) -> bool:
        """Whether users' logits processors change logits. Engines that speculate or pool don't use those of plugins."""
        return bool(self.logits_processors) or (
            bool(self.plugins.logits_processors) and self.speculative_config is None and self.model.spec.pooling is None
        )

    @property
    def tells_tokens(self) -> bool:
        """Whether plans tell the workers all tokens, because stages before the last one don't know which drafts of the
        engine's were right."""
        has_stages = self.parallel.pipeline_parallel_size > 1
        return has_stages and self.speculative_config is not None and not self.workers_draft

    @property
    def workers_draft(self) -> bool:
        """Whether workers make drafts when they compute a step, because the engine plans it before it has all tokens
        that guesses follow."""
        return self.speculative_config is not None and self.max_steps_in_flight > self.parallel.pipeline_parallel_size

    @property
    def drafts_ahead(self) -> bool:
        """Whether the last of several stages makes a model's drafts after a step, for the next one of its requests."""
        return self.workers_draft and self.drafter is not None and self.parallel.pipeline_parallel_size > 1

    @property
    def reads_hidden_states(self) -> bool:
        """Whether a head drafts."""
        return self.drafter is not None and self.drafter.head is not None

    @property
    def tokens_per_block(self) -> int:
        """Tokens in a block of the KV cache, as the scheduler counts blocks: `block_size` of each worker that holds
        other tokens."""
        return self.cache.block_size * self.parallel.context_parallel_size

    @property
    def cache_limits(self) -> CacheLimits:
        """What the groups of the KV cache depend on besides the layers."""
        return CacheLimits(
            self.tokens_per_block,
            self.scheduler.max_model_len,
            self.scheduler.max_num_batched_tokens,
            frees_windows=not self.scheduler.disable_hybrid_kv_cache_manager
            # other connectors take all layers' blocks for one
            and (self.kv_transfer_config is None or self.kv_transfer_config.knows_groups),
            first_keeps_all=self.drafter is not None or self.routed_experts.enable_return_routed_experts,
        )

    @property
    def max_drafts(self) -> int:
        """Maximum number of a request's tokens that are guessed at a time."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def state_rows(self) -> StateRows | None:
        """The rows of states on each worker. None: the model's layers keep no states."""
        if not self.model.spec.keeps_states:
            return None
        return StateRows.of(self.cache, self.scheduler.max_num_seqs, self.max_drafts, self.tokens_per_block)

    @property
    def model_config(self) -> ModelConfig:
        """The same as `model`, under vLLM's name."""
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        """The same as `cache`, under vLLM's name."""
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The same as `scheduler`, under vLLM's name."""
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        """The same as `parallel`, under vLLM's name."""
        return self.parallel

    @property
    def lora_config(self) -> LoRAConfig | None:
        """The same as `lora`, under vLLM's name. None without `enable_lora`."""
        return self.lora if self.lora.enable_lora else None

    @property
    def encoder_limits(self) -> EncoderLimits | None:
        """What a step can encode, and workers keep. None: prompts have neither images nor embeddings."""
        vision, most = self.model.spec.vision, self.scheduler.max_num_batched_tokens
        if vision is None:
            cache_size = max(most, EMBEDDED_PIECE_TOKENS)
            return EncoderLimits(cache_size, EMBEDDED_PIECE_TOKENS) if self.model.enable_prompt_embeds else None
        # no image is larger than a prompt
        largest = min(
            vision.tokens_per_image or self.multimodal.max_image_tokens or self.scheduler.max_model_len,
            self.scheduler.max_model_len,
        )
        is_divisible = not (vision.is_bidirectional or self.multimodal.disable_chunked_mm_input)
        cache_size = max(largest, most)
        return EncoderLimits(cache_size, cache_size if is_divisible else most, is_divisible)

    @property
    def feature_cache_bytes(self) -> int:
        """How much of what features are encoded from a rank keeps. Prompts of embeddings seldom come again."""
        most = self.multimodal.cache_bytes
        return most if self.model.spec.vision is not None else min(most, _MAX_KEPT_EMBEDS)

    def with_num_ranks(self, num_ranks: int) -> EngineConfig:
        """Return the same configuration with another number of data-parallel ranks."""
        parallel = replace(self.parallel, data_parallel_size=num_ranks)
        return replace(self, parallel=parallel)

    def with_max_model_len(self, length: int) -> EngineConfig:
        """Return the same configuration with another maximum length of a sequence."""
        if length == self.scheduler.max_model_len:
            return self
        model, scheduler = (replace(part, max_model_len=length) for part in (self.model, self.scheduler))
        return replace(self, model=model, scheduler=scheduler)

    def stages(self) -> list[Stage]:
        """Return the part of the model that each stage of a rank computes."""
        return self.parallel.stages(self.model.spec)

    def check_files(self) -> None:
        """Check that there are files with weights, on a node where workers run. Those of the hub are downloaded.

        Raises:
            InvalidCheckpoint: there are none. The message names the directory.
        """
        if self.model.load_format == "auto" and self.parallel.worker_cls is None:
            for path in [self.model.model] if self.drafter is None else [self.model.model, self.drafter.path]:
                complete_snapshot(Path(path))
                if not has_weight_files(Path(path)):
                    stored_tensors(Path(path))  # raises the error that says what is missing

    def fitted(self) -> EngineConfig:
        """Return the same configuration with what the checkpoints' files say of the models, from their headers.

        Files that this process doesn't see are left to workers, which see them. A description that another process has
        compared with the same tensors stays as it is.

        Raises:
            InvalidCheckpoint: a file is damaged, or the files and config.json are of different models.
            InvalidConfig: saved shares are divided differently.
        """
        model, drafter, path = self.model, self.drafter, Path(self.model.model)
        if model.load_format == "dummy":
            return self
        if model.load_format == "sharded_state":
            model = replace(model, spec=check_saved_state(path, self.shard_pattern, model.spec, self.division))
        elif has_weight_files(path) and model.spec.implementation == "raycore":
            model = replace(model, spec=fit_model(model.spec, path))
        return replace(self, model=model, drafter=None if drafter is None else drafter.fitted())

    @property
    def division(self) -> Division:
        """How the model's weights are divided over the workers."""
        tp_size = self.parallel.tensor_parallel_size
        ep_size = tp_size * self.parallel.num_sharing if self.parallel.enable_expert_parallel else 1
        return Division(tp_size, ep_size, [len(stage.layers) for stage in self.stages()])

    @property
    def shard_pattern(self) -> str:
        """The pattern of the names of files that `load_format="sharded_state"` reads.

        Raises:
            InvalidConfig: workers would read the same file.
        """
        return checked_pattern((self.model.model_loader_extra_config or {}).get("pattern"), self.division)

    def encode(self) -> bytes:
        """Encode the configuration, with a line that says which copy of raycore did. Actors get it in this form."""
        return seal(msgspec.msgpack.encode(self))

    @staticmethod
    def decode(data: bytes) -> EngineConfig:
        """The inverse of `encode()`. Raises InitializationError if another copy of raycore has encoded it."""
        message = unseal(data, "the process that encoded the configuration", InitializationError)
        return msgspec.msgpack.decode(message, type=EngineConfig)


def changes(old: EngineConfig, new: EngineConfig) -> list[str]:
    """The options that differ, each as text such as `data_parallel_size=2, was 1`. Empty if none differs."""
    found: list[str] = []
    for part in old.__struct_fields__:
        _note_changes(part, getattr(old, part), getattr(new, part), found)
    return found


def _note_changes(name: str, old: object, new: object, found: list[str]) -> None:
    if old == new:
        return
    if isinstance(old, ModelSpec):
        found.append("another config.json or other tensors in the checkpoint")
    elif isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
        for field in old.__struct_fields__:
            _note_changes(field, getattr(old, field), getattr(new, field), found)
    else:
        found.append(f"{name}={new!r}, was {old!r}")
