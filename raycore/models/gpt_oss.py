"""gpt-oss: experts in every layer, all projections with biases, attention sinks, and windows in every second layer."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, windows_by_type
from raycore.models.spec import ClampedSwiglu, Parts
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, num_chosen, num_experts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "attention_bias": True,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _parts(config: JsonFields) -> Parts:
    has_bias = config.bool_("attention_bias")
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("intermediate_size"),
        [True] * config.int_("num_hidden_layers"),
        ExpertChoice("softmax_of_chosen", has_bias=True),
        has_bias=True,
        names=ExpertNames(router="router"),
        is_interleaved=True,
        is_transposed=True,
        size_key="intermediate_size",
    )
    return plain_parts(
        config,
        layer_windows=windows_by_type(config, full_every=2),
        qkv_bias=has_bias,
        o_bias=has_bias,
        sinks=True,
        gate=ClampedSwiglu(config.float_("swiglu_alpha"), config.float_("swiglu_limit")),
        moe=experts,
    )


GPT_OSS = Family(_DEFAULTS, _parts)
