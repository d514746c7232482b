"""dots.llm1: Qwen3 with the experts of GLM-4.5 after the first layers."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts
from raycore.models.glm4_moe import grouped_experts
from raycore.models.qwen2 import windows_of_last
from raycore.models.spec import Parts
from raycore.parts.experts.models import sparse_after

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        layer_windows=windows_of_last(config, config.optional_int("sliding_window")),
        moe=grouped_experts(config, sparse_after(config, "first_k_dense_replace")),
    )


DOTS1 = Family(_DEFAULTS, _parts)
