"""Toys of families whose hidden states take another path through a layer than Llama's. See `FAMILIES`."""

from __future__ import annotations

from families.dense import LLAMA3_ROPE
from families.toy import Toy

PATHS: dict[str, Toy] = {
    # an activation with weights
    "apertus": Toy(
        "ApertusConfig",
        {"head_dim": 32, "num_key_value_heads": 2, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
        {"rope_parameters.rope_theta": 100.0, "rope_parameters.factor": 1.0, "rms_norm_eps": 0.3},
    ),
    "arcee": Toy(
        "ArceeConfig",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
        {"hidden_act": "silu", "rope_parameters.rope_theta": 100.0, "rms_norm_eps": 0.3},
        is_plain=True,
    ),
    # norms of heads, with weights of their own
    "cohere": Toy(
        "CohereConfig",
        {"num_key_value_heads": 2, "logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True},
        {"layer_norm_eps": 0.3, "rope_parameters.rope_theta": 10.0, "hidden_act": "relu2"},
    ),
    # windows, and no rotation in layers without
    "cohere2": Toy(
        "Cohere2Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "logit_scale": 0.5,
            "attention_bias": True,
        },
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention"] * 3,
            "rope_parameters.rope_theta": 100.0,
            "layer_norm_eps": 0.3,
        },
    ),
    # blocks beside each other, each with a norm, and rows of one key-value head after the other
    "falcon": Toy(
        "FalconConfig",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 112,
            "bias": True,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
        {"activation": "silu", "layer_norm_epsilon": 1.0, "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # one key-value head, and one norm of both blocks
    "falcon_multi_query": Toy(
        "FalconConfig",
        {"multi_query": True, "ffn_hidden_size": 112},
        {"activation": "silu", "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # blocks one after the other
    "falcon_sequential": Toy(
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 112, "bias": True},
        is_plain=True,
    ),
    "gemma": Toy(
        # the embedding is multiplied: with 0.3, it would hide what the layers add
        "GemmaConfig",
        {
            "head_dim": 32,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        },
        {"hidden_act": "silu", "rope_parameters.rope_theta": 100.0, "rms_norm_eps": 0.3},
        is_plain=True,
    ),
    "helium": Toy(
        "HeliumConfig",
        {"head_dim": 16, "num_key_value_heads": 2},
        {"hidden_act": "gelu", "rope_parameters.rope_theta": 100.0, "rms_norm_eps": 0.3},
        is_plain=True,
    ),
    # rows of one head after the other, and blocks beside each other
    "gpt_neox": Toy(
        "GPTNeoXConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {
            "use_parallel_residual": False,
            "hidden_act": "silu",
            "layer_norm_eps": 0.3,
            "rope_parameters.partial_rotary_factor": 1.0,
        },
        is_plain=True,
    ),
    # a head with a bias, and adjacent pairs of half of each head
    "gptj": Toy(
        "GPTJConfig",
        {"rotary_dim": 8, "n_inner": 112},
        {"rotary_dim": 16, "activation_function": "silu", "layer_norm_epsilon": 0.3},
        is_plain=True,
    ),
    # norms of results, and multipliers
    "hyperclovax": Toy(
        "HyperCLOVAXConfig",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.1, "rms_norm_eps": 0.3},
        is_plain=True,
    ),
    "jais2": Toy(
        "Jais2Config",
        {"num_key_value_heads": 2},
        {"hidden_act": "gelu", "layer_norm_eps": 0.3, "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # norms with 1 added, and half of each head rotated
    "nemotron": Toy(
        "NemotronConfig",
        {"head_dim": 32, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
        {
            "hidden_act": "silu",
            "norm_eps": 0.3,
            "rope_parameters.partial_rotary_factor": 1.0,
            "rope_parameters.rope_theta": 100.0,
        },
    ),
    # norms without weights
    "olmo": Toy(
        "OlmoConfig",
        {"num_key_value_heads": 2, "attention_bias": True},
        {"hidden_act": "gelu", "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # a head with a bias, and blocks that read the same norm
    "phi": Toy(
        "PhiConfig",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
        {"hidden_act": "silu", "layer_norm_eps": 0.3, "rope_parameters.partial_rotary_factor": 0.5},
        is_plain=True,
    ),
    # three of eight pairs are rotated
    "stablelm": Toy(
        "StableLmConfig",
        {
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.375},
        },
        {"rope_parameters.partial_rotary_factor": 0.5, "rope_parameters.rope_theta": 10.0, "layer_norm_eps": 0.3},
    ),
    # the feed-forward part reads the norm of attention
    "stablelm_parallel": Toy(
        "StableLmConfig", {"num_key_value_heads": 2, "use_parallel_residual": True}, is_plain=True
    ),
    "starcoder2": Toy(
        "Starcoder2Config",
        {"num_key_value_heads": 2, "sliding_window": 17, "tie_word_embeddings": False},
        {"sliding_window": None, "norm_epsilon": 0.3, "hidden_act": "silu", "rope_parameters.rope_theta": 100.0},
    ),
}
