"""Small random checkpoints of every family, made with transformers, and what transformers generates from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from mxfp4 import quantize_experts

NUM_NEW_TOKENS = 12
VOCAB_SIZE = 208

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    # wide, so that the top two logits of a random model are rarely close
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""Of checkpoints that see images, too."""

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

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    # a window that prompts outgrow
    "multi_query": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 17, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    # queries that grow, with periods shorter than prompts
    "ministral3": (
        "Ministral3Config",
        {"head_dim": 32, "num_key_value_heads": 2, "rope_parameters": GROWING, "tie_word_embeddings": False},
    ),
    "mistral3": (
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
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
    # every second layer isn't rotated
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0], "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "num_key_value_heads": 2,
        },
    ),
    # layers of Mamba-2, whose heads are divided over ranks while its group isn't; attention isn't rotated
    "granitemoehybrid": (
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
    "granitemoehybrid_groups": (
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
    # norms after the rotation
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 32,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32, "num_key_value_heads": 2}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True, "num_key_value_heads": 2}),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 2}),
    # windows, and other frequencies in layers without
    "olmo3": (
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
    "glm": ("GlmConfig", {"head_dim": 32, "num_key_value_heads": 2}),
    "glm4": ("Glm4Config", {"head_dim": 16, "num_key_value_heads": 2}),
    "phi3": (
        "Phi3Config",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    # as long as the original: every sequence has the short factors
    "phi3_longrope": (
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
    # caps that scores and logits come near
    "gemma2": (
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
    "gemma3": (
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
    "gemma3_multimodal": (
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
    # no norms after the blocks: with 0.1, the embedding would hide what the layers add
    "vaultgemma": (
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
    # a dense layer between sparse ones
    "qwen3_moe": (
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
    # a clamp that gates reach, and biases wherever there can be one
    "gpt_oss": (
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
    "gpt_oss_mxfp4": (
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
    # experts in groups, chosen by corrected scores; a dense layer first, and shared experts
    "glm4_moe": (
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
    # a query's vector, experts in groups, and scores that grow where positions are stretched
    "deepseek_v3": ("DeepseekV3Config", LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED}),
    # no query's vector, halves of heads that are rotated with each other, and no experts
    "deepseek_v3_dense": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 3, "rope_interleave": False, "attention_bias": False},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED},
    ),
    "deepseek_v2_lite": ("DeepseekV2Config", LATENT | {"q_lora_rank": None}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        LATENT | {"n_group": 2, "topk_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    # a shared expert with a gate
    "qwen2_moe": (
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
    # both kinds of layers, of which some are sparse; value heads share key heads
    "qwen3_next": (
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
    # a decay of each channel, latent attention without rotation, and experts in groups
    "kimi_linear": (
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
    "qwen3_5": (
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
    "qwen3_5_multimodal": (
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
    "qwen3_5_moe": (
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
    # convolutions with biases before and after attention; a size of the feed-forward part that is rounded up
    "lfm2": (
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
    "lfm2_moe": (
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
    "minimax_m2": (
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
}
"""By name: a configuration class of transformers, and its settings, which are added to `SIZES` or replace them."""


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # fused projections, and blocks beside each other
    "gpt_neox": ("GPTNeoXConfig", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    # learned positions, and norms of another kind
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    # weights with a row for each input
    "gpt2": ("GPT2Config", {}),
    "stablelm": ("StableLmConfig", {"num_key_value_heads": 2, "qk_layernorm": True, "use_qkv_bias": True}),
    # scaled logits, windows, and layers without rotation
    "cohere2": (
        "Cohere2Config",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "sliding_window": 17,
            "logit_scale": 0.5,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    # values that are shorter than keys, and experts: raycore's own family keeps latents instead
    "deepseek_v3_heads": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
}
"""Models that transformers' code computes, like `FAMILIES`."""


def make_checkpoint(family: str, directory: Path, **sizes: Any) -> Path:
    """Write `family`'s checkpoint, float32, in several shards where the family's embeddings are untied.

    `sizes`: replace some of `SIZES`.
    """
    import torch
    import transformers

    config_name, options = (FAMILIES | OTHERS)[family]
    torch.manual_seed(sum(map(ord, family)))
    if "text_config" in options:
        vision = VISION | options.get("vision_config", {})
        options = options | {"text_config": SIZES | options["text_config"] | sizes, "vision_config": vision}
    else:
        options = SIZES | options | sizes
    config = getattr(transformers, config_name)(**options)
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0 and norms at 1, which would hide one that isn't applied
        if name.endswith(("bias", "sinks")) or "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer += torch.randn_like(buffer) * 0.2
    if config_name == "GptOssConfig":
        for layer in model.model.layers:
            # gates reach the clamp
            layer.mlp.experts.gate_up_proj.data *= 3
    path = directory / family
    model.save_pretrained(path, max_shard_size="100KB" if not config.tie_word_embeddings else "5GB")
    if family == "gpt_oss_mxfp4":
        quantize_experts(path, _plain(path))
    _tokenizer().save(str(path / "tokenizer.json"))
    return path


def _plain(path: Path) -> Path:
    """Where the numbers of a quantized checkpoint are. Some versions of transformers round them once more."""
    return path.with_name(f"{path.name} as numbers")


def auto_class(config: Any) -> Any:
    """The class of transformers that makes models of this configuration."""
    import transformers

    sees_images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM


def _tokenizer() -> tokenizers.Tokenizer:
    """Token 7 is the word "7"."""
    words = tokenizers.models.WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def prompts() -> list[list[int]]:
    """Prompts of many lengths, two of which share a prefix of several blocks."""
    import random

    rng = random.Random(7)
    made = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 16, 33, 50)]
    made.append([*made[4][:40], 3, 1, 4])
    return made


def reference(path: Path, some: list[list[int]] | None = None) -> list[list[int]]:
    """Greedy continuations of `prompts()`, or of `some`, one prompt at a time, by transformers in float32."""
    import torch
    import transformers

    torch.set_num_threads(1)  # more only wait for each other here, for long if something else computes
    if _plain(path).exists():
        path = _plain(path)
    made_by = auto_class(transformers.AutoConfig.from_pretrained(path))
    model = made_by.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    outputs: list[list[int]] = []
    for prompt in prompts() if some is None else some:
        generated = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs
