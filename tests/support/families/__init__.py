"""Small random checkpoints of every family, made with transformers, and what transformers generates from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from mxfp4 import quantize_experts

from families.dense import DENSE
from families.experts import EXPERTS
from families.latents import LATENTS
from families.paths import PATHS
from families.states import STATES
from families.toy import Toy

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

FAMILIES: dict[str, Toy] = DENSE | EXPERTS | STATES | LATENTS | PATHS
"""By name. Each file of this package has those of a kind, sorted."""


OTHERS: dict[str, Toy] = {
    # learned positions, and norms of another kind
    "opt": Toy("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    # weights with a row for each input
    "gpt2": Toy("GPT2Config", {}),
    # values that are shorter than keys, and experts: raycore's own family keeps latents instead
    "deepseek_v3_heads": Toy(
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

    toy = (FAMILIES | OTHERS)[family]
    options = dict(toy.settings)
    torch.manual_seed(sum(map(ord, family)))
    if "text_config" in options:
        vision = VISION | options.get("vision_config", {})
        options = options | {"text_config": SIZES | options["text_config"] | sizes, "vision_config": vision}
    else:
        options = SIZES | options | sizes
    config = getattr(transformers, toy.config)(**options)
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0, norms at 1 and so on, which would hide one that isn't applied
        if name.endswith(("bias", "sinks", "alpha_p", "alpha_n", "router.scale", "per_expert_scale")) or "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
        elif not parameter.any():  # such as a router, which would choose the same experts for all tokens
            parameter.data += torch.randn_like(parameter) * 0.3
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer += torch.randn_like(buffer) * 0.2
    if toy.config == "GptOssConfig":
        for layer in model.model.layers:
            # gates reach the clamp
            layer.mlp.experts.gate_up_proj.data *= 3
    path = directory / family
    model.save_pretrained(path, max_shard_size="100KB" if not config.tie_word_embeddings else "5GB")
    if family == "kimi_k25":
        _rename(path, "language_model.model.blocks.", "language_model.model.layers.")
    if family == "gpt_oss_mxfp4":
        quantize_experts(path, _plain(path))
    _tokenizer().save(str(path / "tokenizer.json"))
    return path


def _rename(path: Path, saved: str, stored: str) -> None:
    """Give tensors the names that real checkpoints have, where transformers doesn't bring back what it renames."""
    from safetensors.torch import load_file, save_file

    for file in path.glob("*.safetensors"):
        tensors = {name.replace(saved, stored): each for name, each in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    for index in path.glob("*.index.json"):
        index.write_text(index.read_text().replace(saved, stored))


def _plain(path: Path) -> Path:
    """Where the numbers of a quantized checkpoint are. Some versions of transformers round them once more."""
    return path.with_name(f"{path.name} as numbers")


def auto_class(config: Any) -> Any:
    """The class of transformers that makes models of this configuration."""
    import transformers

    # Mistral 4 is one of those that see images, although it doesn't
    sees_images = hasattr(config, "vision_config") or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
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

    model = _loaded(path)
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


def predicted(path: Path, some: list[list[int]], continuations: list[list[int]]) -> list[list[int]]:
    """For each token of these continuations of `some`, what transformers predicts from all tokens before it.

    It equals the continuations if, and only if, they are those of `reference`, and takes a single step for each prompt.
    """
    import torch

    model = _loaded(path)
    outputs: list[list[int]] = []
    for prompt, continuation in zip(some, continuations, strict=True):
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*prompt, *continuation[:-1]]])).logits[0, len(prompt) - 1 :]
        outputs.append(logits_TV.argmax(-1).tolist())
    return outputs


def _loaded(path: Path) -> Any:
    """The checkpoint's model, by transformers in float32."""
    import torch
    import transformers

    torch.set_num_threads(1)  # more only wait for each other here, for long if something else computes
    if _plain(path).exists():
        path = _plain(path)
    made_by = auto_class(transformers.AutoConfig.from_pretrained(path))
    return made_by.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
