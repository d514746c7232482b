"""Toys of families with latent attention. See `FAMILIES`."""

from __future__ import annotations

from typing import Any

from families.toy import Toy

STRETCHED = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
}
"""Latent attention, and experts after a dense layer."""

INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 14, "index_n_heads": 10}
"""What selects the tokens that attention sees. With few heads, many scores would be 0, and of equal ones, transformers
selects any."""

LATENTS: dict[str, Toy] = {
    "deepseek_v2": Toy(
        "DeepseekV2Config",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED},
    ),
    "deepseek_v2_lite": Toy("DeepseekV2Config", LATENT | {"q_lora_rank": None}),
    # a query's vector, experts in groups, and scores that grow where positions are stretched
    "deepseek_v3": Toy("DeepseekV3Config", LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED}),
    # attention to 8 tokens, which every layer selects
    "deepseek_v32": Toy(
        "DeepseekV32Config",
        LATENT | INDEXER | {"n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED},
        {
            "index_topk": 5,
            "n_group": 2,
            "topk_group": 3,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_parameters.mscale_all_dim": 0.7,
        },
    ),
    # no query's vector, halves of heads that are rotated with each other, and no experts
    "deepseek_v3_dense": Toy(
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 3, "rope_interleave": False, "attention_bias": False},
    ),
    "glm4_moe_lite": Toy(
        "Glm4MoeLiteConfig",
        LATENT | {"n_group": 2, "topk_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    # one layer sees the tokens that the layer before it has selected
    "glm_moe_dsa": Toy(
        "GlmMoeDsaConfig",
        LATENT
        | INDEXER
        | {
            "num_hidden_layers": 4,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared", "full"],
        },
        {"index_topk": 5, "indexer_types": ["full", "shared", "shared", "full"]},
    ),
    # the texts of a model that sees images
    "kimi_k25": Toy(
        "Kimi_K25Config",
        {
            "text_config": LATENT | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2},
            "vision_config": {"pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 1},
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
        },
        {"text_config.topk_group": 3, "text_config.num_experts_per_tok": 2, "text_config.n_group": 2},
        is_plain=True,
    ),
    # queries that grow, and groups of experts by probabilities
    "mistral4": Toy(
        "Mistral4Config",
        LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "rope_parameters": {**STRETCHED, "llama_4_scaling_beta": 0.5},
        },
        {
            "topk_group": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_parameters.llama_4_scaling_beta": 0.1,
            "rope_parameters.mscale_all_dim": 0.7,
        },
    ),
}
