"""Toys of families of which some layers keep a state. See `FAMILIES`."""

from __future__ import annotations

from families.toy import Toy

STATES: dict[str, Toy] = {
    # half of a head is rotated
    "bamba": Toy(
        "BambaConfig",
        {
            "attn_layer_indices": [1],
            "num_key_value_heads": 2,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"rope_parameters.partial_rotary_factor": 1.0, "rms_norm_eps": 0.1},
    ),
    # layers of Mamba-2, whose heads are divided over ranks while its group isn't; attention isn't rotated
    "granitemoehybrid": Toy(
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "num_key_value_heads": 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 24,
            "mamba_expand": 3,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 16,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    # experts beside a network that all tokens get
    "granitemoehybrid_experts": Toy(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
        {"num_experts_per_tok": 2, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    ),
    "granitemoehybrid_groups": Toy(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
            "mamba_n_heads": 8,
            "mamba_n_groups": 4,
            "mamba_d_state": 24,
            "mamba_conv_bias": False,
        },
    ),
    # a decay of each channel, latent attention without rotation, and experts in groups
    "kimi_linear": Toy(
        "KimiLinearConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "linear_num_heads": 4,
            "linear_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    # convolutions with biases before and after attention; a size of the feed-forward part that is rounded up
    "lfm2": Toy(
        "Lfm2Config",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_key_value_heads": 2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "norm_eps": 1e-3,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 16,
            "tie_word_embeddings": True,
        },
    ),
    # a dense layer before sparse ones
    "lfm2_moe": Toy(
        "Lfm2MoeConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_key_value_heads": 2,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": Toy(
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": Toy(
        "Qwen3_5MoeTextConfig",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_5_multimodal": Toy(
        "Qwen3_5Config",
        {
            "text_config": {
                "layer_types": ["linear_attention", "full_attention"],
                "head_dim": 32,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "vision_config": {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
        },
    ),
    # both kinds of layers, of which some are sparse; value heads share key heads
    "qwen3_next": Toy(
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
}
