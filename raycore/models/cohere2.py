"""Command R (Cohere) and Command A (Cohere 2): attention and feed-forward part read the same layer norm, rotated pairs
are adjacent, and logits are scaled. In Cohere 2, three of four layers have windows, and only these rotate.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, norm_eps_at, plain_parts, windows_by_type
from raycore.models.rotation import parse_rotation
from raycore.models.spec import NormName, Parts, TensorNames

COHERE_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
}
COHERE2_DEFAULTS = {**COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}
_KNOWN = {"use_gated_activation": True, "use_parallel_block": True, "use_qk_norm": False}
"""Settings that files of Cohere 2 have, and what they are in all of its models."""
_NAMES = TensorNames(before_feed_forward="input_layernorm")


def cohere_parts(config: JsonFields, norm: NormName = "layer", **parts: Any) -> Parts:
    """Return what all of them have, and `parts`."""
    has_bias = config.bool_("attention_bias")
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm=norm,
        is_parallel=True,
        logits_multiplier=config.float_("logit_scale"),
        names=_NAMES,
        **parts,
    )


def _parts(config: JsonFields) -> Parts:
    rotations = [parse_rotation(config, is_adjacent=True)] * config.int_("num_hidden_layers")
    return cohere_parts(config, rotations=rotations, qk_norm="own_heads" if config.bool_("use_qk_norm") else None)


def _cohere2_parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    rotation = parse_rotation(config, is_adjacent=True)
    windows = windows_by_type(config, full_every=config.int_("sliding_window_pattern"))
    rotations = [None if window is None else rotation for window in windows]
    return cohere_parts(config, layer_windows=windows, rotations=rotations)


COHERE = Family({**COHERE_DEFAULTS, "rope_theta": 500000.0}, _parts, norm_eps_at("layer_norm_eps"))
COHERE2 = Family(COHERE2_DEFAULTS, _cohere2_parts, norm_eps_at("layer_norm_eps"))
