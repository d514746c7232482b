"""Options that need, exclude or decide others."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from raycore.checkpoint.gguf.header import is_gguf
from raycore.config.cache import CACHE_BACKENDS
from raycore.config.given_places import device_ids
from raycore.config.model import ModelConfig
from raycore.config.parallel import ParallelConfig
from raycore.config.scheduler import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.config.speculative import SpeculativeConfig

logger = logging.getLogger(__name__)

_DEFAULT_STATE_BYTES = 1 << 30
"""What the states of running sequences take on a worker by default, at most. As many states are kept for prefixes."""
_LEAST_SEQS = 4


def executor_backend(asked: str | None, parallel: ParallelConfig) -> str:
    if asked == "inline" and parallel.world_size > 1:
        names = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
        sizes = {name: getattr(parallel, name) for name in names}
        needing = " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise InvalidConfig(
            f"executor_backend='inline' runs one worker in the engine's process, but {needing} "
            f"need{'' if ' and ' in needing else 's'} {parallel.world_size}: use executor_backend='ray'"
        )
    return asked or ("inline" if parallel.world_size == 1 else "ray")


def check_context_parallel(chosen: dict[str, Any], parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check who may hold different tokens' keys and values."""
    size, tp_size = parallel.decode_context_parallel_size, parallel.tensor_parallel_size
    copies = [each.copies(spec, tp_size) for each in spec.attentions]
    for num, kept, sharers, why in copies:
        if num % size == 0:
            continue
        possible = [each for each in range(1, num + 1) if not any(other.num % each for other in copies)]
        more = "" if num > 1 else f": only {sharers} share them"
        raise InvalidConfig(
            f"decode_context_parallel_size={size} doesn't divide the number of workers that have the same "
            f"{kept}: {num}, with tensor_parallel_size={tp_size}{why}. "
            f"Choose one of {possible}{more}"
        )
    if parallel.context_parallel_size == 1:
        return
    if (why := spec.why_not("context_parallel")) is not None:
        options = _context_options(parallel)
        raise InvalidConfig(f"{options} can't be used with {spec.architecture}, which {why}: {_omit(options)}")
    if parallel.prefill_context_parallel_size > 1 and parallel.enable_expert_parallel:
        raise InvalidConfig(
            f"prefill_context_parallel_size={parallel.prefill_context_parallel_size} can't be used with "
            "enable_expert_parallel=True, whose experts have one place each: omit one of them"
        )


def check_given_places(chosen: dict[str, Any], parallel: ParallelConfig) -> None:
    """Check the bundles and devices that are given. Their number is checked, too."""
    indices = parallel.bundle_indices
    if parallel.device_ids is None:
        return
    if indices is not None:
        raise InvalidConfig(
            f"device_ids={parallel.device_ids!r} reserves nothing, and placement_bundle_indices="
            f"{parallel.placement_bundle_indices!r} says where to reserve: omit one of them"
        )
    if chosen.get("device") == "cpu":
        raise InvalidConfig(f"device_ids={parallel.device_ids!r} needs GPUs, and device='cpu': omit one of them")
    device_ids(parallel, os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_vision(chosen: dict[str, Any], parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check that what else is asked can be done with a model that sees images."""
    if spec.vision is None:
        return
    asked = None
    num_deep, stage = len(spec.vision.deepstack_layers), parallel.stages(spec)[0]
    if parallel.context_parallel_size > 1 and spec.encodes_only:
        options = _context_options(parallel)
        asked = f"{options} in an engine that only encodes them: {_omit(options)}"
    elif len(stage.layers) <= num_deep and not spec.encodes_only:
        asked = (
            f"a first stage of {len(stage.layers)} layers, because embeddings of images are added in the first "
            f"{num_deep + 1} layers: set pipeline_layers"
        )
    if asked is not None:
        raise InvalidConfig(
            f"{spec.architecture} sees images, which can't be used with {asked}. Or load only its model of texts "
            "(language_model_only=True)"
        )


def check_own_head(chosen: dict[str, Any]) -> None:
    """Check that the files have the layer with which the model is to draft."""
    speculative: SpeculativeConfig | None = chosen.get("speculative_config")
    is_own = speculative is not None and speculative.method == "mtp"
    if is_own and chosen.get("load_format") == "sharded_state":
        raise InvalidConfig(
            "speculative_config: method='mtp' reads a layer of the model's checkpoint that save_sharded_state() leaves "
            "out: omit load_format='sharded_state' and give that checkpoint, or use another method"
        )


def check_without_tokenizer(chosen: dict[str, Any], spec: ModelSpec) -> None:
    """Check that nothing else that is asked needs a tokenizer."""
    asked = None
    if spec.vision is not None:
        asked = "prompts with images: add language_model_only=True"
    elif chosen.get("prepare_structured_outputs"):
        asked = "prepare_structured_outputs=True: omit it"
    if asked is not None:
        raise InvalidConfig(f"skip_tokenizer_init=True can't be used with {asked}")


def check_prompt_embeds(chosen: dict[str, Any], parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check that what else is asked can be done with prompts of embeddings."""
    if not chosen.get("enable_prompt_embeds"):
        return
    asked = None
    speculative: SpeculativeConfig | None = chosen.get("speculative_config")
    if spec.vision is not None:
        asked = f"{spec.architecture}, which sees images: load only its model of texts (language_model_only=True)"
    elif spec.encoder is not None:
        asked = f"{spec.architecture}, an encoder, whose embeddings depend on more than tokens: omit it"
    elif (why := spec.why_not("prompt_embeds")) is not None:
        asked = f"{spec.architecture}, which {why}: omit it"
    elif speculative is not None and speculative.has_model:
        asked = (
            f"speculative_config's method {speculative.method!r}, whose model needs tokens: use 'ngram' or 'suffix', "
            "or omit one of them"
        )
    if asked is not None:
        raise InvalidConfig(f"enable_prompt_embeds=True can't be used with {asked}")


def _context_options(parallel: ParallelConfig) -> str:
    """Return the options that ask for context parallelism, as text."""
    names = "decode_context_parallel_size", "prefill_context_parallel_size"
    return " and ".join(f"{name}={getattr(parallel, name)}" for name in names if getattr(parallel, name) > 1)


def _omit(options: str) -> str:
    """Return advice to omit all of `_context_options`."""
    return f"omit {'them' if ' and ' in options else 'it'}"


def default_num_seqs(spec: ModelSpec, tp_size: int, num_drafts: int) -> int:
    """Return the default of `max_num_seqs`: fewer sequences if they have large states, whose memory is set aside.

    `num_drafts`: with each draft, a sequence has another state.
    """
    # those of convolutions are few
    numbers = sum(math.prod(each.shape) for mixer in spec.mixers for each in mixer.state(tp_size) if each.is_float32)
    if not numbers:
        return DEFAULT_MAX_NUM_SEQS
    return min(DEFAULT_MAX_NUM_SEQS, max(_LEAST_SEQS, _DEFAULT_STATE_BYTES // (4 * numbers * (1 + num_drafts))))


def step_limits(
    num_seqs: int | None, num_tokens: int | None, default_seqs: int = DEFAULT_MAX_NUM_SEQS
) -> tuple[int, int]:
    """Return `max_num_seqs` and `max_num_batched_tokens`.

    If only one of them is given, the default of the other is adjusted so that a step can hold a token of each sequence.
    """
    if num_seqs is None:
        num_tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS if num_tokens is None else num_tokens
        return min(default_seqs, num_tokens), num_tokens
    if num_tokens is None:
        return num_seqs, max(DEFAULT_MAX_NUM_BATCHED_TOKENS, num_seqs)
    if num_tokens < num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens={num_tokens} is below max_num_seqs={num_seqs}: "
            "a step must hold at least one token of every running request"
        )
    return num_seqs, num_tokens


def check_encoder(chosen: dict[str, Any], parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check what encoders can't do, and turn off by default what they have no use for."""
    if spec.encoder is None:
        return
    asked = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "enable_lora": chosen.get("enable_lora"),
        "long_prefill_token_threshold": chosen.get("long_prefill_token_threshold"),
        "kv_cache_dtype": chosen.get("kv_cache_dtype") not in (None, "auto"),
        "enable_prefix_caching": chosen.get("enable_prefix_caching"),
    }
    for name in [name for name, is_asked in asked.items() if is_asked]:
        why = "whose prompts are computed whole, and not kept"
        raise InvalidConfig(
            f"{name}={chosen.get(name)!r} can't be used with {spec.architecture}, an encoder, {why}: omit it"
        )
    chosen["enable_prefix_caching"] = False


def whole_prompt_limits(limits: tuple[int, int], asked: int | None, max_model_len: int) -> tuple[int, int]:
    """Return `max_num_seqs` and `max_num_batched_tokens` of a model whose prompts are computed in one step each.

    Args:
        limits: what they would be otherwise.
        asked: the option `max_num_batched_tokens`. None: it isn't given.
    """
    num_seqs, num_tokens = limits
    if asked is not None and asked < max_model_len:
        raise InvalidConfig(
            f"max_num_batched_tokens={asked} is below max_model_len={max_model_len}, but an encoder computes a prompt "
            "in one step: raise the former, or lower the latter"
        )
    return num_seqs, max(num_tokens, max_model_len)


def model_length(asked: int | None, spec: ModelSpec) -> int:
    if asked is None:
        shorter = None if spec.pooling is None else spec.pooling.max_length
        return spec.max_length if shorter is None else min(spec.max_length, shorter)
    if asked > spec.max_length:
        raise InvalidConfig(
            f"max_model_len={asked} is above the checkpoint's maximum of {spec.max_length} tokens "
            "(max_position_embeddings, which hf_overrides may replace)"
        )
    return asked


def check_loader_config(model: ModelConfig) -> None:
    if model.load_format != "sharded_state" and model.model_loader_extra_config is not None:
        raise InvalidConfig(
            f"model_loader_extra_config={model.model_loader_extra_config!r} needs load_format='sharded_state', and "
            f"load_format={model.load_format!r}: omit it"
        )


def take_stored_formats(chosen: dict[str, Any], path: Path, spec: ModelSpec) -> None:
    """Check the options that only say how the checkpoint is stored, and leave them out: its files say it, too.

    Raises:
        InvalidConfig: the checkpoint is stored in another way.
    """
    if chosen.get("load_format") == "gguf":
        if not is_gguf(path):
            raise InvalidConfig(f"load_format='gguf', but {path} isn't a GGUF file: omit it")
        del chosen["load_format"]
    if chosen.get("load_format") == "sharded_state" and is_gguf(path):
        raise InvalidConfig(
            f"load_format='sharded_state', but {path} is a GGUF file: omit it, or give the directory that "
            "save_sharded_state() has written"
        )
    wanted = chosen.get("quantization")
    if wanted == "fp8" and spec.quantization is not None and spec.quantization.is_fp8:
        is_possible = chosen.get("device") != "cpu" and not chosen.get("batch_invariant") and not spec.why_not("fp8")
        if not is_possible:  # only GPUs quantize further weights
            del chosen["quantization"]
        return
    if wanted in (None, "fp8", "int8"):
        return
    stored = "gguf" if is_gguf(path) else None if spec.quantization is None else spec.quantization.method
    if wanted != stored:
        found = "its weights aren't quantized" if stored is None else f"its weights are stored as {stored!r}"
        raise InvalidConfig(f"quantization={wanted!r}, but {path} says that {found}: omit it")
    del chosen["quantization"]


def check_quantization(chosen: dict[str, Any], path: Path, spec: ModelSpec) -> None:
    wanted = chosen.get("quantization")
    if wanted is None:
        return
    if wanted == "fp8" and chosen.get("device") == "cpu":
        raise InvalidConfig("quantization='fp8' needs a GPU, and device='cpu': use quantization='int8'")
    if wanted == "int8" and chosen.get("device") == "cuda":
        raise InvalidConfig("quantization='int8' needs a CPU, and device='cuda': use quantization='fp8'")
    if wanted == "fp8" and chosen.get("batch_invariant"):
        raise InvalidConfig(
            "quantization='fp8' can't be used with batch_invariant=True, because the kernel that multiplies in fp8 "
            "depends on the number of tokens: omit one of them"
        )
    why = spec.why_not("fp8")
    if wanted == "fp8" and why is not None:
        raise InvalidConfig(f"quantization='fp8', but {path} is a {spec.architecture}, and {why}: omit it")
    why = spec.why_not("int8")
    if wanted == "int8" and spec.quantization is None and why is not None:
        raise InvalidConfig(f"quantization='int8', but {path} ({spec.architecture}) {why}: omit it")


def check_activation_dtype(chosen: dict[str, Any], path: Path, spec: ModelSpec) -> None:
    """What only workers know is checked by `choose_formats`."""
    wanted, device, backend = (chosen.get(name) for name in ("cpu_activation_dtype", "device", "attention_backend"))
    if wanted in (None, "auto"):
        return
    asked = f"cpu_activation_dtype={wanted!r}"
    if device == "cuda":
        raise InvalidConfig(f"{asked} needs a CPU, and device={device!r}: omit it")
    if backend not in (None, "auto", "native"):
        raise InvalidConfig(
            f"{asked} needs attention_backend='native', and attention_backend={backend!r}: omit one of them"
        )
    if spec.quantization is None or "integers" not in spec.quantization.formats:
        already = ", and quantization='int8' rounds inputs to 8 bits without it"
        why = already if chosen.get("quantization") == "int8" else ""
        raise InvalidConfig(f"{asked}, but {path} has no weights in integers{why}: omit it")
    if spec.quantization.is_ordered:
        raise InvalidConfig(
            f"{asked}, but the groups of {path} are of similar inputs (desc_act or actorder), and such integers become "
            "numbers of the data type: omit it"
        )
    if spec.quantization.row_bits == {8}:
        raise InvalidConfig(
            f"{asked}, but {path} says that inputs are rounded to 8 bits, each token's with one scale: omit it"
        )


def check_cache_dtype(chosen: dict[str, Any]) -> None:
    """What only workers know is checked by `choose_cache_dtype`."""
    wanted, device, backend = (chosen.get(name) for name in ("kv_cache_dtype", "device", "attention_backend"))
    needed = CACHE_BACKENDS.get(wanted or "auto")
    if needed is None:
        return
    if device == ("cuda" if needed == "native" else "cpu"):
        where, other = ("a CPU", "fp8") if needed == "native" else ("a GPU", "int8_per_token_head")
        raise InvalidConfig(f"kv_cache_dtype={wanted!r} needs {where}, and device={device!r}: use {other!r}")
    if backend not in (None, "auto", needed):
        raise InvalidConfig(
            f"kv_cache_dtype={wanted!r} needs attention_backend={needed!r}, and attention_backend={backend!r}: "
            "omit one of them"
        )


def check_state_interval(chosen: dict[str, Any], block_size: int, num_shares: int) -> None:
    """`num_shares`: how many workers hold different tokens of a block, `block_size` each."""
    interval = chosen.get("mamba_block_size")
    if interval is not None and interval % (block_size * num_shares):
        of_workers = f" times the {num_shares} workers that hold different tokens" if num_shares > 1 else ""
        raise InvalidConfig(
            f"mamba_block_size={interval} isn't a multiple of block_size={block_size}{of_workers}: choose one that is"
        )


def check_chunks(spec: ModelSpec, block_size: int, num_shares: int) -> None:
    """`num_shares`: how many workers hold different tokens of a block, `block_size` each."""
    windows = spec.layer_windows if spec.windows_are_chunks else []
    for chunk in sorted({window for window in windows if window is not None}):
        if chunk % (block_size * num_shares):
            of_workers = f" times the {num_shares} workers that hold different tokens" if num_shares > 1 else ""
            raise InvalidConfig(
                f"block_size={block_size}{of_workers} doesn't divide the {chunk} tokens of a chunk, within which "
                f"{spec.architecture} attends: choose one that does"
            )


def check_steps_in_flight(chosen: dict[str, Any], parallel: ParallelConfig) -> None:
    num_steps, is_async = chosen.get("max_concurrent_batches"), chosen.get("async_scheduling")
    num_stages = parallel.pipeline_parallel_size
    speculative: SpeculativeConfig | None = chosen.get("speculative_config")
    is_waiting = not is_async and (num_steps or 1) <= num_stages
    if speculative is not None and speculative.has_model and num_stages > 1 and is_waiting:
        raise InvalidConfig(
            f"speculative_config's method {speculative.method!r} needs async_scheduling=True with "
            f"pipeline_parallel_size={num_stages}, because only the last stage has what drafts: set it, or use 'ngram' "
            "or 'suffix'"
        )
    if num_steps is None:
        return
    if is_async is not None and is_async != (num_steps > 1) and num_stages == 1:
        raise InvalidConfig(
            f"max_concurrent_batches={num_steps} contradicts async_scheduling={is_async}, which means "
            f"{'more than one step' if is_async else 'one step'} in flight: omit one of them"
        )


def check_transformers(chosen: dict[str, Any], parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check what models that transformers' code computes can't do."""
    if spec.implementation != "transformers":
        return
    speculative = chosen.get("speculative_config")
    asked = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "batch_invariant": chosen.get("batch_invariant"),
        "quantization": chosen.get("quantization"),
        "load_format": chosen.get("load_format") == "sharded_state",
        "speculative_config": speculative is not None and speculative.has_head,
    }
    for name in [name for name, is_asked in asked.items() if is_asked]:
        shown = " with a head that drafts" if name == "speculative_config" else f"={chosen.get(name)!r}"
        raise InvalidConfig(
            f"{name}{shown} can't be used with {spec.architecture}, which transformers' code computes: omit it, or use "
            "a model of one of raycore's families"
        )


def warn_of_transformers(spec: ModelSpec, model_impl: str | None) -> None:
    """Say what it costs that raycore has no family for the model, unless transformers' code was asked for."""
    if spec.implementation == "transformers" and model_impl != "transformers":
        logger.warning(
            "raycore has no family for %s: transformers' code computes its layers, more slowly, without CUDA graphs. "
            "It excludes pipeline and expert parallelism, divided prompts, quantization and heads that draft. "
            "model_impl='transformers' asks for this, and 'raycore' refuses such models",
            spec.architecture,
        )


def check_logits_processors(chosen: dict[str, Any], spec: ModelSpec) -> None:
    """Check that users' logits processors have something to do, and that they see each token before the next one."""
    if not chosen.get("logits_processors"):
        return
    if chosen.get("speculative_config") is not None:
        raise InvalidConfig(
            "logits_processors can't be used with speculative_config: they see one token of a request at a time. Omit "
            "one of them"
        )
    if spec.pooling is not None:
        raise InvalidConfig("logits_processors are given for a model that pools, which has no logits: omit them")
