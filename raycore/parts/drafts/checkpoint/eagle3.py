"""The description of an EAGLE-3 head, from its checkpoint's `config.json`. Does not import torch.

A head drafts tokens for one model, its *target*. It is a decoder of one layer, whose input has two halves: a token's
embedding, and hidden states of the target at the position before. Source: Li et al., EAGLE-3, 2025 (arXiv:2503.01840).
The keys are those that vLLM reads, also in the format of the library speculators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.registry import parse_model_spec
from raycore.models.spec import ModelSpec

_SPECULATORS_KEY = "speculators_model_type"
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_BASES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_UNSUPPORTED = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "parallel_drafting": False,
}
"""Variants of heads that aren't supported, with the values that stand for "no"."""


class Eagle3Spec(msgspec.Struct, frozen=True, tag=True):
    """What a head has beyond the sizes of its layer."""

    draft_vocab_size: int
    """Number of tokens that the head can draft."""
    target_hidden_size: int
    target_layers: list[int]
    """The target's layers whose inputs the head reads, ascending. For layer 0, these are the embeddings."""
    norm_before_residual: bool
    """Whether the layer adds its results to the normalized hidden states instead of the original ones."""


def is_eagle3(path: Path) -> bool:
    """Whether the checkpoint in the directory `path` is an EAGLE-3 head. False if its config.json can't be read."""
    try:
        config = JsonFields.read(path.expanduser() / "config.json")
    except InvalidCheckpoint:
        return False
    names = [*(config.list_("architectures") or []), config.get(_SPECULATORS_KEY), path.name]
    return "draft_vocab_size" in config or any("eagle3" in str(name).lower() for name in names)


def load_eagle3_spec(path: Path, target: ModelSpec) -> tuple[ModelSpec, Eagle3Spec]:
    """Read the description of the head in the directory `path`, which drafts for the model `target`.

    Returns: the sizes of the head's layer, and the rest.

    Raises:
        InvalidCheckpoint: the head isn't supported, or isn't for this target. The message names the file, the key and
            the value.
    """
    config = JsonFields.read(path.expanduser() / "config.json").converted(_flat)
    for key, value in _UNSUPPORTED.items():
        if (config.get(key) or value) != value:
            raise config.error(key, repr(value))
    nested = config.child("eagle_config")
    if not nested.bool_("use_aux_hidden_state", default=True):
        raise nested.error("use_aux_hidden_state", "true, because the head reads hidden states of several layers")
    spec = parse_model_spec(config.converted(_with_base), JsonFields(str(path), {}))
    if spec.num_layers != 1:
        raise config.error("num_hidden_layers", "1, as EAGLE-3 heads have")
    if spec.vocab_size != target.vocab_size:
        raise config.error("vocab_size", f"{target.vocab_size}, as the target has")
    hidden_size = config.optional_int("target_hidden_size") or spec.hidden_size
    if hidden_size != target.hidden_size:
        key = "hidden_size" if config.get("target_hidden_size") is None else "target_hidden_size"
        raise config.error(key, f"{target.hidden_size}, the target's hidden_size")
    draft_vocab_size = config.optional_int("draft_vocab_size") or spec.vocab_size
    if draft_vocab_size > spec.vocab_size:
        raise config.error("draft_vocab_size", f"at most vocab_size={spec.vocab_size}")
    layers = _target_layers(nested if config.get(_LAYERS_KEY) is None else config, target.num_layers)
    return spec, Eagle3Spec(draft_vocab_size, hidden_size, layers, config.bool_("norm_before_residual"))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a head in the format of speculators in the other format."""
    if _SPECULATORS_KEY not in config:
        return config
    layer = cast("dict[str, Any]", config.get("transformer_layer_config") or {})
    base = "Qwen3ForCausalLM" if layer.get("model_type") == "qwen3" else "LlamaForCausalLM"
    return {"norm_before_residual": True} | layer | config | {"architectures": [base]}


def _with_base(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the architecture of the head's layer, which is X for `Eagle3X` and `XEagle3`."""
    names = cast("list[object]", config.get("architectures") or [])
    bases = [base for name in names if (base := str(name).replace("Eagle3", "")) in _BASES]
    return config | {"architectures": bases or names}


def _target_layers(config: JsonFields, num_layers: int) -> list[int]:
    """Return the target's layers that are read: by default an early, a middle and a late one."""
    given = config.list_(_LAYERS_KEY)
    layers = given or [2, num_layers // 2, num_layers - 3]
    is_valid = all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers)
    if given == [] or not is_valid or (given is None and layers != sorted(set(layers))):
        raise config.error(_LAYERS_KEY, f"a list of the target's layers, 0 to {num_layers - 1}")
    return sorted(set(layers))
