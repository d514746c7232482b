"""A small configuration of Gemma 4 in which layers read the keys and values of others, and have inputs of their own."""

from __future__ import annotations

from typing import Any

GEMMA4 = "Gemma4ForCausalLM"
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": TYPES * 3,
    "sliding_window": 16,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 6,
}
WITHOUT_INPUTS = CONFIG | {"hidden_size_per_layer_input": 0}
