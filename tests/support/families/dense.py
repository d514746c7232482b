"""Toys of families whose layers are attention and one gated network. See `FAMILIES`."""

from __future__ import annotations

from families.toy import Toy

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}

GROWING = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}

DENSE: dict[str, Toy] = {
    "cwm": Toy(
        "CwmConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "bos_token_id": 1,
        },
        {"sliding_window": 5, "layer_types": ["full_attention"] * 3, "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    "ernie4_5": Toy("Ernie4_5Config", {"head_dim": 32, "use_bias": True, "num_key_value_heads": 2}),
    # windows, and no rotation in layers without
    "exaone4": Toy(
        "Exaone4Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
        },
        {
            "sliding_window": 5,
            "layer_types": ["full_attention"] * 3,
            # a model without windows, whose layers all rotate
            "sliding_window, layer_types": (None, ["full_attention"] * 3),
            "rope_parameters.rope_theta": 100.0,
        },
        is_plain=True,
    ),
    # caps that scores and logits come near
    "gemma2": Toy(
        "Gemma2Config",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "sliding_window": 17,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            # the embedding is multiplied: with 0.3, it would hide what the layers add
            "initializer_range": 0.1,
        },
    ),
    "gemma3": Toy(
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "query_pre_attn_scalar": 20,
            # the embedding is multiplied: with 0.3, it would hide what the layers add
            "initializer_range": 0.1,
        },
    ),
    "gemma3_multimodal": Toy(
        "Gemma3Config",
        {
            "text_config": {
                "head_dim": 32,
                "num_key_value_heads": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 17,
                "query_pre_attn_scalar": 20,
                "initializer_range": 0.1,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    # several streams, networks beside attention, sparse gates, and layers that read the keys and values of others
    "gemma3n": Toy(
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": [96, 80, 96, 96],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 17,
            "hidden_size_per_layer_input": 12,
            # the vocabulary has more
            "vocab_size_per_layer_input": 150,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 10,
            "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.8],
            "tie_word_embeddings": False,
            "final_logit_softcapping": 4.0,
            "initializer_range": 0.1,
        },
        {
            "sliding_window": 5,
            "altup_active_idx": 0,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": [0.0, 0.5, 0.0, 0.0],
            "rope_parameters.sliding_attention.rope_theta": 100.0,
            "rope_parameters.full_attention.rope_theta": 100.0,
        },
    ),
    # layers that read the keys and values of others, inputs of layers, larger heads without windows
    "gemma4": Toy(
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}, 5: {"head_dim": 16}},
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "attention_bias": True,
            "sliding_window": 17,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 208,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 4.0,
            # the embedding is multiplied: with 0.3, it would hide what the layers add
            "initializer_range": 0.1,
        },
        {
            "sliding_window": 5,
            "hidden_activation": "silu",
            "rope_parameters.full_attention.partial_rotary_factor": 1.0,
            "rope_parameters.sliding_attention.rope_theta": 100.0,
            "rope_parameters.full_attention.rope_theta": 100.0,
        },
    ),
    "gemma4_multimodal": Toy(
        "Gemma4Config",
        {
            "text_config": {
                "num_key_value_heads": 2,
                "head_dim": 8,
                "global_head_dim": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 17,
                "pad_token_id": 0,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": 208,
                "initializer_range": 0.1,
            },
        },
        is_plain=True,
    ),
    # a pipeline's stage ends before layers that share keys and values
    "gemma4_unified": Toy(
        "Gemma4UnifiedTextConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 2,
            "sliding_window": 17,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
        },
    ),
    # values that are what keys are made of, fewer key-value heads without windows, and no inputs of layers
    "gemma4_values": Toy(
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 17,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "initializer_range": 0.1,
        },
    ),
    "glm": Toy("GlmConfig", {"head_dim": 32, "num_key_value_heads": 2}),
    "glm4": Toy("Glm4Config", {"head_dim": 16, "num_key_value_heads": 2}),
    "granite": Toy(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "num_key_value_heads": 2,
        },
    ),
    # norms after the rotation
    "hunyuan": Toy(
        "HunYuanDenseV1Config",
        {
            "head_dim": 32,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "llama2": Toy("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3": Toy(
        "LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ),
    # windows in some layers
    "ministral": Toy(
        "MinistralConfig",
        {
            "head_dim": 32,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 17,
        },
        {"sliding_window": 5, "layer_types": ["full_attention"] * 2, "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # queries that grow, with periods shorter than prompts
    "ministral3": Toy(
        "Ministral3Config",
        {"head_dim": 32, "num_key_value_heads": 2, "rope_parameters": GROWING, "tie_word_embeddings": False},
    ),
    # a window that prompts outgrow
    "mistral": Toy("MistralConfig", {"sliding_window": 17, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "mistral3": Toy(
        "Mistral3Config",
        {
            "text_config": {
                "model_type": "ministral3",
                "head_dim": 32,
                "num_key_value_heads": 2,
                "rope_parameters": GROWING,
            },
            "vision_config": {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "multi_query": Toy("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "olmo2": Toy("Olmo2Config", {"num_key_value_heads": 2}),
    # windows, and other frequencies in layers without
    "olmo3": Toy(
        "Olmo3Config",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": LLAMA3_ROPE,
            },
        },
    ),
    "phi3": Toy(
        "Phi3Config",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    # as long as the original: every sequence has the short factors
    "phi3_longrope": Toy(
        "Phi3Config",
        {
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.2,
                "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
                "long_factor": [1.5, 2.0, 4.0, 8.0, 16.0, 32.0],
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": Toy("Qwen2Config", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen3": Toy("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "seed_oss": Toy("SeedOssConfig", {"head_dim": 32, "num_key_value_heads": 2}),
    # every second layer isn't rotated
    "smollm3": Toy("SmolLM3Config", {"no_rope_layers": [1, 0], "num_key_value_heads": 2, "tie_word_embeddings": True}),
    # no norms after the blocks: with 0.1, the embedding would hide what the layers add
    "vaultgemma": Toy(
        "VaultGemmaConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "sliding_window": 17,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "attention_bias": True,
        },
    ),
}
