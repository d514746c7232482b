"""Options become a configuration: checked, completed, and resolved once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from raycore.checkpoint.hub_cache import find_directory
from raycore.checkpoint.model_spec import load_model_spec, read_config
from raycore.config.cache import CacheConfig
from raycore.config.checks import (
    check_activation_dtype,
    check_cache_dtype,
    check_chunks,
    check_context_parallel,
    check_encoder,
    check_given_places,
    check_loader_config,
    check_logits_processors,
    check_own_head,
    check_prompt_embeds,
    check_quantization,
    check_state_interval,
    check_steps_in_flight,
    check_transformers,
    check_vision,
    check_without_tokenizer,
    default_num_seqs,
    executor_backend,
    model_length,
    step_limits,
    take_stored_formats,
    whole_prompt_limits,
)
from raycore.config.deployment import deployed
from raycore.config.engine import EngineConfig
from raycore.config.executor import ExecutorConfig
from raycore.config.given_places import take_variables
from raycore.config.model import AUTO_LENGTH, ModelConfig
from raycore.config.parallel import ParallelConfig
from raycore.config.rank_checks import check_num_ranks
from raycore.config.recovery import RecoveryConfig
from raycore.config.scheduler import SchedulerConfig
from raycore.config.vllm_table import without_vllm_options
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.json_fields import JsonFields
from raycore.models.registry import GENERATION_KEYS, generation_defaults
from raycore.models.spec import ModelSpec
from raycore.options.declared import check_options, options_of, with_options
from raycore.parts.adapters.config import LoRAConfig
from raycore.parts.constraints.config.reasoning import with_parser
from raycore.parts.constraints.config.structured_outputs import parsers_of
from raycore.parts.drafts.config.drafter import DrafterConfig, resolve_drafter
from raycore.parts.drafts.config.speculative import SpeculativeConfig, SpeculativeShorthand, with_shorthands
from raycore.parts.images.config import MultiModalConfig
from raycore.parts.images.models import without_text, without_vision
from raycore.parts.pooling.config import PoolingConfig, check_pooling, choose_pooling
from raycore.parts.routed_experts.config import RoutedExpertsConfig, check_routed_experts
from raycore.parts.traces.config import TracesConfig
from raycore.parts.transfers.config.ec_transfer import ECTransferConfig, check_ec_transfer
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig, check_kv_transfer, offloading
from raycore.plugins import find_plugins, import_plugin_file, load_general_plugins
from raycore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from raycore.options.types import EngineOptions

_PartT = TypeVar("_PartT", bound=msgspec.Struct)
_PARTS: tuple[tuple[type[msgspec.Struct], str], ...] = (
    (ModelConfig, "Model"),
    (RoutedExpertsConfig, "Model"),
    (EngineConfig, "Engine"),
    (SpeculativeShorthand, "Engine"),
    (TracesConfig, "Engine"),
    (ParallelConfig, "Parallelism and placement"),
    (CacheConfig, "KV cache"),
    (SchedulerConfig, "Scheduler"),
    (ExecutorConfig, "Workers"),
    (RecoveryConfig, "Recovery"),
    (LoRAConfig, "LoRA adapters"),
    (PoolingConfig, "Pooling"),
    (MultiModalConfig, "Images"),
)
ENGINE_OPTIONS = {each.name: each for part, group in _PARTS for each in options_of(part, group)}
"""All options of an engine, by keyword argument."""


@with_options(ENGINE_OPTIONS)
def resolve(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]
) -> EngineConfig:
    """Check the options, read the checkpoint's `config.json`, and compute the values that were not given.

    Args:
        options: docs/options.md lists them with types, ranges and defaults. None means the default, except for options
            for which None is a value of its own.

    Raises:
        InvalidConfig: an option is unknown or invalid, or two options contradict each other. The message names them.
        InvalidCheckpoint: `model` isn't a checkpoint that raycore supports.
    """
    given_model: Any = model  # users may pass anything
    if given_model is None:
        raise InvalidConfig("model=None: give the directory of a checkpoint, or its name on the hub")
    plugins = find_plugins()
    load_general_plugins(plugins)
    asked = with_shorthands(options)
    given = check_options(ENGINE_OPTIONS, without_vllm_options({"model": model, "tokenizer": tokenizer, **asked}))
    chosen: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None or not ENGINE_OPTIONS[name].is_open
    }
    take_variables(chosen, os.environ)
    if chosen.get("tokens_only"):
        chosen["skip_tokenizer_init"] = True
    parsers = parsers_of(chosen.get("structured_outputs_config"))
    plugin = options.get("reasoning_parser_plugin") or parsers.get("reasoning_parser_plugin")
    if plugin:
        import_plugin_file("reasoning_parser_plugin", str(plugin))
    parser = options.get("reasoning_parser") or parsers.get("reasoning_parser")
    chosen["reasoning_config"] = with_parser(chosen.get("reasoning_config"), parser)
    path, tokenizer = _directories(chosen)
    parallel = deployed(_part(ParallelConfig, chosen))
    backend = executor_backend(chosen.get("executor_backend"), parallel)
    pooling = _part(PoolingConfig, chosen)
    spec = _model_spec(path, tokenizer, chosen, pooling)
    if chosen.get("skip_tokenizer_init"):
        check_without_tokenizer(chosen, spec)
    else:
        spec = _with_end_of(tokenizer, spec)
    spec = _with_defaults(spec, chosen)
    take_stored_formats(chosen, path, spec)
    check_transformers(chosen, parallel, spec)
    check_encoder(chosen, parallel, spec)
    check_pooling(chosen, spec.pooling, parallel.prefill_context_parallel_size)
    if parallel.enable_expert_parallel and not spec.has_experts:
        raise InvalidConfig(f"enable_expert_parallel=True, but {path} ({spec.architecture}) has no experts: omit it")
    spec.check_tensor_parallel(parallel.tensor_parallel_size, parallel.enable_expert_parallel)
    parallel.stages(spec)  # raises if layers can't be divided like this
    check_quantization(chosen, path, spec)
    check_activation_dtype(chosen, path, spec)
    check_cache_dtype(chosen)
    check_context_parallel(chosen, parallel, spec)
    check_ec_transfer(chosen, parallel, spec)
    check_vision(chosen, parallel, spec)
    check_prompt_embeds(chosen, parallel, spec)
    check_steps_in_flight(chosen, parallel)
    check_given_places(chosen, parallel)
    check_logits_processors(chosen, spec)
    length = model_length(_asked_length(chosen), spec)
    speculative = chosen.get("speculative_config")
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    default_seqs = default_num_seqs(spec, parallel.tensor_parallel_size, num_drafts)
    limits = step_limits(chosen.get("max_num_seqs"), chosen.get("max_num_batched_tokens"), default_seqs)
    if spec.encoder is not None:
        limits = whole_prompt_limits(limits, chosen.get("max_num_batched_tokens"), length)
    num_seqs, num_tokens = limits
    check_own_head(chosen)
    drafter = _drafter(speculative, path, spec, length, parallel)
    transfer = _kv_transfer(chosen)
    check_kv_transfer(transfer, chosen, spec)
    config = _part(
        EngineConfig,
        chosen,
        model=_part(
            ModelConfig,
            chosen,
            model=os.path.abspath(path),
            tokenizer=os.path.abspath(tokenizer),
            spec=spec,
            max_model_len=length,
        ),
        cache=_part(CacheConfig, chosen),
        scheduler=_part(
            SchedulerConfig,
            chosen,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=length,
            fits_max_model_len=chosen.get("max_model_len") == AUTO_LENGTH,
            computes_whole_prompts=spec.encoder is not None,
        ),
        parallel=parallel,
        executor=_part(ExecutorConfig, chosen, backend=backend),
        recovery=_part(RecoveryConfig, chosen),
        lora=_lora(chosen),
        kv_transfer_config=transfer,
        pooling=pooling,
        routed_experts=check_routed_experts(
            _part(RoutedExpertsConfig, chosen), spec, transfer, parallel.prefill_context_parallel_size
        ),
        multimodal=_multimodal(chosen, path, spec),
        traces=_part(TracesConfig, chosen),
        drafter=drafter,
        plugins=plugins,
    )
    check_loader_config(config.model)
    check_state_interval(chosen, config.cache.block_size, config.parallel.context_parallel_size)
    check_chunks(spec, config.cache.block_size, config.parallel.context_parallel_size)
    check_num_ranks(config)
    return config.fitted()


def non_defaults(options: EngineOptions) -> list[str]:
    """The options that are not at their defaults, each as text such as `data_parallel_size=2`.

    `options`: what `resolve` gets.
    """
    given = check_options(ENGINE_OPTIONS, without_vllm_options(options))
    return [f"{name}={value!r}" for name, value in given.items() if value != ENGINE_OPTIONS[name].default]


def _model_spec(path: Path, tokenizer: Path, chosen: dict[str, Any], pooling: PoolingConfig) -> ModelSpec:
    overrides, config_path = chosen.get("hf_overrides"), _config_directory(chosen)
    choice = choose_pooling(pooling, path, read_config((config_path or path).expanduser(), overrides), tokenizer)
    impl, length = chosen.get("model_impl", "auto"), _asked_length(chosen)
    spec = load_model_spec(path, impl, length, overrides=overrides, pooling=choice, config_path=config_path)
    limits: dict[str, int] = chosen.get("limit_mm_per_prompt") or {}
    is_text_only = chosen.get("language_model_only", False) or limits.get("image") == 0
    if is_text_only:
        return without_vision(spec)
    transfer: ECTransferConfig | None = chosen.get("ec_transfer_config")
    return spec if transfer is None or transfer.loads else without_text(spec)


def _asked_length(chosen: dict[str, Any]) -> int | None:
    asked = chosen.get("max_model_len")
    return None if asked == AUTO_LENGTH else asked


def _with_end_of(tokenizer_path: Path, spec: ModelSpec) -> ModelSpec:
    """`spec` with the tokenizer's end-of-sequence token among its own. A fine-tuned model may end outputs with that
    token, although its generation_config.json is the base model's."""
    from raycore.text.tokenizer_files import read_eos_token_id  # imported lazily: `raycore --help` doesn't need it

    token_id = read_eos_token_id(tokenizer_path)
    if token_id is None or token_id in spec.eos_token_ids or token_id >= spec.vocab_size:
        return spec
    return replace(spec, eos_token_ids=[*spec.eos_token_ids, token_id])


def _with_defaults(spec: ModelSpec, chosen: dict[str, Any]) -> ModelSpec:
    """`spec` with the defaults of sampling parameters that the options ask for.

    Raises:
        InvalidConfig: one of them isn't valid. The message names it.
    """
    source: str = chosen.get("generation_config", "auto")
    overrides: dict[str, Any] = chosen.get("override_generation_config") or {}
    if source == "auto" and not overrides:
        return spec
    defaults = spec.generation_defaults
    if source == "vllm":
        defaults = {}
    elif source != "auto":
        directory = Path(source).expanduser()
        if not (directory / "generation_config.json").is_file():
            raise InvalidConfig(
                f"generation_config={source!r} isn't 'auto', 'vllm' or a directory with a generation_config.json"
            )
        defaults = generation_defaults(JsonFields.read(directory / "generation_config.json"))
    known = generation_defaults(JsonFields("override_generation_config", overrides))
    unknown = sorted(overrides.keys() - GENERATION_KEYS)
    if unknown:
        raise InvalidConfig(
            f"override_generation_config has {unknown[0]!r}: known are {', '.join(sorted(GENERATION_KEYS))}"
        )
    made = replace(spec, generation_defaults={**defaults, **known})
    values = dict(made.generation_defaults)
    if "max_new_tokens" in values:
        values["max_tokens"] = values.pop("max_new_tokens")
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise InvalidConfig(f"generation_config and override_generation_config: {error}") from None
    return made


def _directories(chosen: dict[str, Any]) -> tuple[Path, Path]:
    """Return the directories of the model and the tokenizer."""
    cache, tokenizer = chosen.get("download_dir"), chosen.get("tokenizer")
    model = find_directory(chosen["model"], "config.json", chosen.get("revision"), cache)
    revision = chosen.get("tokenizer_revision")
    if tokenizer is None or chosen.get("skip_tokenizer_init"):
        if revision not in (None, chosen.get("revision")):
            raise InvalidConfig(f"tokenizer_revision={revision!r} needs tokenizer, the tokenizer's name: omit it")
        return model, model
    return model, find_directory(tokenizer, "tokenizer.json", revision, cache, "tokenizer")


def _config_directory(chosen: dict[str, Any]) -> Path | None:
    """The directory that `hf_config_path` names."""
    given = chosen.get("hf_config_path")
    if given is None:
        return None
    same = chosen.get("revision") if given == chosen["model"] else None
    return find_directory(given, "config.json", same, chosen.get("download_dir"), "hf_config_path")


def _lora(chosen: dict[str, Any]) -> LoRAConfig:
    lora = _part(LoRAConfig, chosen)
    if lora.enable_lora and lora.num_adapters < lora.max_loras:
        raise InvalidConfig(
            f"max_cpu_loras={lora.max_cpu_loras} is less than max_loras={lora.max_loras}: workers must hold a step's "
            "adapters"
        )
    return lora


def _kv_transfer(chosen: dict[str, Any]) -> KVTransferConfig | None:
    transfer, size_gib = chosen.get("kv_transfer_config"), chosen.get("kv_offloading_size")
    return transfer if size_gib is None else offloading(size_gib, transfer)


def _multimodal(chosen: dict[str, Any], path: Path, spec: ModelSpec) -> MultiModalConfig:
    if spec.vision is None:
        return _part(MultiModalConfig, chosen)
    from raycore.parts.images.checkpoint.image_processor import (
        max_image_tokens,  # imported lazily: only models with images need it
    )

    most = max_image_tokens(path, spec.vision, chosen.get("mm_processor_kwargs") or {})
    return _part(MultiModalConfig, chosen, max_image_tokens=most)


def _drafter(
    speculative: SpeculativeConfig | None, path: Path, spec: ModelSpec, length: int, parallel: ParallelConfig
) -> DrafterConfig | None:
    if speculative is None or not speculative.has_model:
        return None
    return resolve_drafter(
        speculative,
        path,
        spec,
        length,
        parallel.tensor_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
    )


def _part(struct: type[_PartT], chosen: dict[str, Any], **decided: Any) -> _PartT:
    """Build a part of the configuration from the options given and the values computed from them."""
    fields = {each.field: chosen[each.name] for each in options_of(struct, "") if each.name in chosen}
    return struct(**fields | decided)
