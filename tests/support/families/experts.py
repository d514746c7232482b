"""Toys of families with experts, and plain attention. See `FAMILIES`."""

from __future__ import annotations

from typing import Any

from families.toy import Toy

GROUPED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
"""Experts in groups, chosen by corrected scores, and shared experts."""
OTHER_GROUPS: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 3,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 2,
}
LAGUNA: dict[str, Any] = {
    "head_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads_per_layer": [4, 8, 4],
    "num_key_value_heads": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 17,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 1.5,
    "attention_bias": True,
}

EXPERTS: dict[str, Toy] = {
    # a gate of attention, windows, and no rotation in the layer without; a dense layer first
    "afmoe": Toy(
        "AfmoeConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "route_scale": 1.5,
            "mup_enabled": True,
            "attention_bias": True,
            # the embedding is multiplied: with 0.3, it would hide what the layers add
            "initializer_range": 0.1,
        },
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention"] * 3,
            "num_experts_per_tok": 2,
            "route_scale": 1.0,
            "mup_enabled": False,
        },
    ),
    # a rotated dense layer first, of another size, and the average of experts and shared ones
    "cohere2_moe": Toy(
        "Cohere2MoeConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 17,
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 96,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "attention_bias": True,
            "logit_scale": 0.5,
        },
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention"] * 3,
            "num_experts_per_tok": 2,
            "expert_selection_fn": "softmax",
            "norm_topk_prob": False,
            "shared_expert_combination_strategy": "sum",
            "prefix_dense_sliding_window_pattern": 2,
            "layer_norm_eps": 0.3,
            "rms_norm_eps": 1e-5,
        },
    ),
    # a dense layer first, and windows after it
    "dots1": Toy(
        "Dots1Config",
        GROUPED
        | {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "sliding_window": 17,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        OTHER_GROUPS
        | {"norm_topk_prob": False, "sliding_window": 5, "layer_types": ["sliding_attention"] + ["full_attention"] * 2},
        is_plain=True,
    ),
    # only layers with windows rotate; experts in groups after a dense layer
    "exaone_moe": Toy(
        "ExaoneMoeConfig",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        OTHER_GROUPS
        | {"norm_topk_prob": False, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3, "rms_norm_eps": 0.1},
        is_plain=True,
    ),
    # experts in groups, chosen by corrected scores; a dense layer first, and shared experts
    "glm4_moe": Toy(
        "Glm4MoeConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    # probabilities that are corrected for the choice; experts in the middle layer alone
    "ernie4_5_moe": Toy(
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
        {"moe_k": 2, "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # a clamp that gates reach, and biases wherever there can be one
    "gpt_oss": Toy(
        "GptOssConfig",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 17,
        },
    ),
    "gpt_oss_mxfp4": Toy(
        "GptOssConfig",
        {
            "head_dim": 32,
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 17,
        },
    ),
    "granitemoe": Toy(
        "GraniteMoeConfig",
        {
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
        },
        {"num_experts_per_tok": 2, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
        is_plain=True,
    ),
    "granitemoeshared": Toy(
        "GraniteMoeSharedConfig",
        {
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
        },
        {"num_experts_per_tok": 2},
        is_plain=True,
    ),
    # experts without groups after a dense layer
    "hy_v3": Toy(
        "HYV3Config",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
        },
        {"num_experts_per_tok": 2, "router_scaling_factor": 1.0, "rope_parameters.rope_theta": 100.0},
        is_plain=True,
    ),
    # layers with different numbers of query heads, each with a gate, and of rotated components
    "laguna": Toy(
        "LagunaConfig",
        LAGUNA | {"gating": True},
        {
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_experts_per_tok": 2,
            "moe_routed_scaling_factor": 1.0,
            "rope_parameters.full_attention.partial_rotary_factor": 1.0,
            "rope_parameters.sliding_attention.rope_theta": 100.0,
        },
    ),
    # a gate for each element of the result of attention
    "laguna_elements": Toy("LagunaConfig", LAGUNA | {"gating": "per-element"}, is_plain=True),
    # chunks, and a layer without them and without rotation, whose queries grow; what experts read is weighed
    "llama4": Toy(
        "Llama4TextConfig",
        {
            "head_dim": 24,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": True,
        },
        {
            "attention_chunk_size": 32,
            "layer_types": ["full_attention"] * 4,
            "no_rope_layers": [1, 1, 1, 1],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "floor_scale": 30,
            "attn_scale": 2.0,
            "num_experts_per_tok": 2,
            "rope_parameters.rope_theta": 100.0,
        },
    ),
    # values that are shorter than keys; layers with windows have more heads of keys, and sinks
    "mimo_v2_flash": Toy(
        "MiMoV2FlashConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "v_head_dim": 16,
            "attention_bias": True,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        OTHER_GROUPS
        | {
            "norm_topk_prob": False,
            "sliding_window": 5,
            "attention_value_scale": 1.0,
            "rope_parameters.full_attention.partial_rotary_factor": 1.0,
            "rope_parameters.sliding_attention.rope_theta": 100.0,
        },
    ),
    "minimax_m2": Toy(
        "MiniMaxM2Config",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    # layers that select 3 blocks of 4 tokens, the last one always, and others
    "minimax_m3": Toy(
        "MiniMaxM3VLConfig",
        {
            "text_config": {
                "model_type": "minimax_m3_vl_text",
                "head_dim": 24,
                "intermediate_size": 32,
                "dense_intermediate_size": 96,
                "shared_intermediate_size": 40,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "routed_scaling_factor": 1.5,
                "swiglu_alpha": 1.2,
                "swiglu_limit": 0.9,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1 / 3},
                "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
                "index_n_heads": 2,
                "index_head_dim": 14,
                "index_block_size": 4,
                "index_topk_blocks": 3,
                "index_local_blocks": 1,
            },
            "vision_config": {"spatial_merge_size": 2},
            "projector_hidden_size": 16,
            "tie_word_embeddings": False,
        },
        {
            "text_config.index_block_size": 5,
            "text_config.index_topk_blocks": 2,
            "text_config.index_local_blocks": 2,
            "text_config.num_experts_per_tok": 2,
            "text_config.routed_scaling_factor": 1.0,
            "text_config.swiglu_alpha": 1.702,
            "text_config.swiglu_limit": 7.0,
        },
    ),
    "mixtral": Toy(
        "MixtralConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
    "olmoe": Toy(
        "OlmoeConfig",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
        {"num_experts_per_tok": 2, "norm_topk_prob": False},
        is_plain=True,
    ),
    # a shared expert with a gate
    "qwen2_moe": Toy(
        "Qwen2MoeConfig",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    # a dense layer between sparse ones
    "qwen3_moe": Toy(
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    # more query heads in layers with windows; gates with limits, others for shared experts; experts stacked apart
    "step3p7": Toy(
        "Step3p7Config",
        {
            "text_config": {
                "head_dim": 24,
                "num_hidden_layers": 3,
                "num_key_value_heads": 2,
                "num_sliding_attention_heads": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 17,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "n_routed_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "share_expert_dim": 48,
                "moe_router_scaling_factor": 1.5,
                "swiglu_limits": [None, 0.5, 0.0],
                "swiglu_limits_shared": [0.7, None, 0.4],
                "query_pre_attn_scalar": 20,
                "pad_token_id": 0,
                "attention_bias": True,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                },
            },
            "tie_word_embeddings": False,
        },
        {
            "text_config.sliding_window": 5,
            "text_config.num_experts_per_tok": 2,
            "text_config.moe_router_scaling_factor": 1.0,
            "text_config.swiglu_limits": [None, None, 0.3],
            "text_config.swiglu_limits_shared": [0.0, None, 0.4],
            "text_config.query_pre_attn_scalar": 5,
            "text_config.rope_parameters.full_attention.partial_rotary_factor": 1.0,
            "text_config.rope_parameters.sliding_attention.rope_theta": 100.0,
        },
        is_plain=True,
    ),
    # no norms of heads, and no bias of the last projection
    "solar_open": Toy(
        "SolarOpenConfig",
        GROUPED | {"head_dim": 32, "norm_topk_prob": False},
        OTHER_GROUPS | {"norm_topk_prob": True},
        is_plain=True,
    ),
}
