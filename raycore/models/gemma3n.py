"""Gemma 3n, text: Gemma 3 with norms of values, several streams of hidden states, networks of low rank at attention,
gates of which few numbers are left, and inputs of layers. The last layers read the keys and values of earlier ones.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.closing import LayerInputsSpec
from raycore.models.family import DEFAULTS, Family, check_known, fields_of, gate, plain_parts, sliding_layers
from raycore.models.gemma4 import rotation_of_type, sources
from raycore.models.mixers.attention import LayerHeads
from raycore.models.spec import Parts, TensorNames
from raycore.models.streams import StreamsSpec

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_FULL_EVERY = 5
"""Without types, every such layer has no window."""
_SPARSITY, _NUM_SPARSE = 0.95, 10
"""Without a pattern, so many first layers of more have this sparsity."""
_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_SIZES = "intermediate_size of each layer"
"""The key of the intermediate sizes, if config.json has a list of them."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the types and the rotations of all layers, and one intermediate size."""
    fields = fields_of(config, _DEFAULTS)
    num_layers = fields.int_("num_hidden_layers")
    if isinstance(config.get("intermediate_size"), list):
        sizes = fields.list_("intermediate_size") or []
        if len(sizes) != num_layers or any(type(each) is not int or each < 1 for each in sizes):
            raise fields.error("intermediate_size", f"a positive integer, or {num_layers} (num_hidden_layers) of them")
        config |= {"intermediate_size": max(sizes), _SIZES: sizes}
    if fields.list_("layer_types") is None:
        is_full = ((layer + 1) % _FULL_EVERY == 0 for layer in range(num_layers))
        config["layer_types"] = ["full_attention" if each else "sliding_attention" for each in is_full]
    given, scaling = fields.child("rope_parameters"), fields.child("rope_scaling").values
    full = {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e6)}
    local = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 1e4)}
    config["rope_parameters"] = {
        "full_attention": {**full, **given.child("full_attention").values, **scaling},
        "sliding_attention": {**local, **given.child("sliding_attention").values},
    }
    return {key: config[key] for key in config if key not in ("rope_scaling", "rope_theta")}


def _cutoffs(config: JsonFields) -> list[float | None]:
    """Return by layer how many standard deviations above the mean of a gate its numbers are left."""
    num_layers, pattern = config.int_("num_hidden_layers"), config.list_("activation_sparsity_pattern")
    if pattern is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        pattern = [_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    if len(pattern) != num_layers or any(type(each) not in (int, float) or not 0 <= each < 1 for each in pattern):
        expected = f"a list of {num_layers} entries (num_hidden_layers), each from 0 to less than 1"
        raise config.error("activation_sparsity_pattern", expected)
    return [NormalDist().inv_cdf(each) if each > 0 else None for each in pattern]


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"use_bidirectional_attention": False})
    has_bias, windows, window = (
        config.bool_("attention_bias"),
        sliding_layers(config) or [],
        config.int_("sliding_window"),
    )
    full, local = (rotation_of_type(config, kind) for kind in ("full_attention", "sliding_attention"))
    num_streams, size = config.int_("altup_num_inputs", low=2), config.int_("hidden_size_per_layer_input")
    active = config.int_("altup_active_idx", low=0)
    if active >= num_streams:
        raise config.error("altup_active_idx", f"less than altup_num_inputs={num_streams}")
    sizes = config.list_(_SIZES) or [config.int_("intermediate_size")] * len(windows)
    made: dict[tuple[int, float | None], StreamsSpec] = {}
    closings: list[StreamsSpec] = []
    for own, cutoff in zip(sizes, _cutoffs(config), strict=True):
        part = StreamsSpec(
            intermediate_size=own,
            input_size=size,
            num_streams=num_streams,
            active=active,
            laurel_rank=config.int_("laurel_rank"),
            cutoff=cutoff,
            scales_active=config.bool_("altup_correct_scale"),
        )
        closings.append(made.setdefault((own, cutoff), part))
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="heads",
        norms_values=True,
        gate=gate(config, "hidden_activation"),
        attention_scale=1.0,
        layer_heads=[LayerHeads(source=each) for each in sources(config, windows)],
        layer_windows=[window if each else None for each in windows],
        rotations=[local if each else full for each in windows],
        closings=closings,
        layer_inputs=LayerInputsSpec(size, config.int_("vocab_size_per_layer_input"), num_streams),
        embedding_multiplier=math.sqrt(config.int_("hidden_size")),
        rounds_embedding_multiplier=True,
        logits_softcap=config.optional_float("final_logit_softcapping"),
        names=_NAMES,
    )


GEMMA3N = Family(_DEFAULTS, _parts, _convert, decoder="raycore.decoder.streams.StreamsDecoder")
