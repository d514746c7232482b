"""Describes a model that transformers computes: its sizes, and what it asks of attention.

The driver does this before it starts anything, with a network that has no weights. So a model that can't be computed is
refused at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from raycore.errors import InvalidCheckpoint
from raycore.fallback.linears import adaptable
from raycore.fallback.networks import check_modules, empty_network, read_config
from raycore.fallback.plan import divided_sizes, plan_of
from raycore.fallback.trace import AttentionCall, Trace, Unsupported, trace
from raycore.json_fields import JsonFields
from raycore.models.spec import CheckpointDType, ModelSpec

_DECODER = "raycore.fallback.decoder.TransformersDecoder"
_TRACED_LENGTH = 2048
"""Up to how many tokens masks are examined if the configuration names no maximum."""
_LONG_PASS = 2500
"""Tokens of a second pass, which costs little without weights."""
_NUM_COPIES = 2
"""How much wider than the widest layer a step's results are, because transformers' code computes in more steps."""


def describe(path: Path, generation: dict[str, Any], max_length: int | None) -> ModelSpec:
    """Return the description of the model in the directory `path`, as transformers computes it.

    Args:
        generation: fields of `ModelSpec` that follow from generation_config.json.
        max_length: maximum number of tokens of a sequence. None: the model's.

    Raises:
        InvalidCheckpoint: the model can't be computed this way. The message says why.
    """
    fields = JsonFields.read(path / "config.json")
    name = ", ".join(map(str, fields.list_("architectures") or [])) or f"model_type={fields.get('model_type')}"
    try:
        return _described(path, generation, max_length)
    except Unsupported as error:
        raise InvalidCheckpoint(
            f"{path} ({name}) can't be computed by transformers' code in raycore: {error}"
        ) from error


def _described(path: Path, generation: dict[str, Any], max_length: int | None) -> ModelSpec:
    config = read_config(path)
    text = config.get_text_config(decoder=True)
    network = empty_network(config)
    known_length = longest(text)
    done = trace(network, known_length or _TRACED_LENGTH)
    if known_length is None:
        raise Unsupported("its config.json names no maximum length (max_position_embeddings)")
    # some code selects keys once there are many
    long = trace(network, known_length, min(known_length, _LONG_PASS))
    if [replace(call, sinks_N=None) for call in long.calls] != [replace(call, sinks_N=None) for call in done.calls]:
        raise Unsupported("its attention changes with the number of tokens")
    _check_rotations(text, min(max_length or known_length, known_length))
    first = done.calls[0]
    check_modules(network, done.called)
    check_calls(done.calls)
    hidden_size = int(network.get_input_embeddings().weight.shape[1])
    return ModelSpec(
        architecture=type(network).__name__,
        model_type=config.model_type,
        implementation="transformers",
        vocab_size=done.num_logits,
        hidden_size=max(hidden_size, getattr(text, "hidden_size", None) or hidden_size),
        intermediate_size=_NUM_COPIES * widest(network, done),
        num_layers=len(done.calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=max(call.head_dim for call in done.calls),
        attention_scale=first.scale,
        attention_softcap=first.softcap,
        layer_windows=[call.window for call in done.calls],
        rotations=[None] * len(done.calls),
        sinks=any(call.sinks_N is not None for call in done.calls),
        rms_norm_eps=1e-6,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        max_position_embeddings=known_length,
        dtype=_dtype(text),
        decoder=_DECODER,
        tensor_parallel_sizes=_tensor_parallel_sizes(network, first),
        linears=adaptable(network, done),
        **generation,
    )


def check_calls(calls: list[AttentionCall]) -> None:
    """Raise Unsupported if calls differ in what one cache has only once."""
    for what, values in {
        "numbers of query heads": {call.num_heads for call in calls},
        "numbers of key heads": {call.num_kv_heads for call in calls},
        "caps of scores": {call.softcap for call in calls},
    }.items():
        if len(values) > 1:
            raise Unsupported(f"its layers have different {what} ({', '.join(map(str, sorted(values, key=str)))})")
    head_dim = max(call.head_dim for call in calls)
    if head_dim % 2:
        raise Unsupported(f"its heads have an odd number of elements ({head_dim})")


def _check_rotations(text: Any, length: int) -> None:
    """Raise Unsupported if the rotations of a step's tokens would depend on its longest sequence."""
    found: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    of_types = [cast("dict[str, Any]", each) for each in found.values() if isinstance(each, dict)]
    for parameters in [found, *of_types]:
        original = parameters.get("original_max_position_embeddings") or 0
        if parameters.get("rope_type") == "longrope" and length > original:
            raise Unsupported(
                f"its rotations (longrope) change for all requests of a step if one has more than {original} tokens: "
                f"set max_model_len to {original} at most"
            )


def longest(text: Any) -> int | None:
    """Return the maximum number of tokens of a sequence that the configuration names. None: it names none."""
    names = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
    lengths = [getattr(text, name, None) for name in names]
    return next((int(length) for length in lengths if isinstance(length, int) and length > 0), None)


def widest(network: Any, done: Trace) -> int:
    """Return the largest number of a token's results that a layer has at a time."""
    outputs = [module.out_features for module in done.called if isinstance(module, nn.Linear)]
    head = network.get_output_embeddings()
    sizes = [size for size in outputs if head is None or size != head.out_features]
    experts = [max(each.shape[1:]) for each in network.parameters() if each.ndim == 3]
    text = network.config.get_text_config(decoder=True)
    num_experts = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 1
    return max([*sizes, *(size * num_experts for size in experts), 1])


def _dtype(text: Any) -> CheckpointDType:
    name = str(getattr(text, "dtype", None) or torch.float32).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise Unsupported(f"its weights are stored in {name}")
    return name


def _tensor_parallel_sizes(network: Any, call: AttentionCall) -> list[int]:
    """Return the numbers of ranks that can divide the model."""
    sizes = divided_sizes(network, plan_of(network))
    if not sizes:
        return [1]
    shared = reduce(math.gcd, [*sizes, call.num_heads, call.num_kv_heads])
    return [size for size in range(1, shared + 1) if shared % size == 0]
