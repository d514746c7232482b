"""Checkpoints that draft: EAGLE-3 heads with random weights, and a target and heads whose tokens are known.

The *counting* model continues token t with (t + STEP) mod VOCAB, whatever was before it. Its embeddings are one-hot,
with a constant component, and no layer changes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raycore.demo import demo_model_path

VOCAB, HIDDEN, HEADS, FEED_FORWARD = 320, 352, 4, 352
STEP = 7
_CONSTANT = HIDDEN - 1
"""The component that is 1 in every embedding."""
_SHARPNESS = 0.3
"""How much larger the logit of the next token is than the others, before the norm scales it."""
_LAYERS = 4


def head_config(hidden_size: int, vocab_size: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a head for a target of these sizes."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
    }
    return config | changes


def random_head(config: dict[str, Any], *, has_embedding: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a head with this config, by name, in float32. It drafts every other token if it drafts half."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.6 * shape[-1] ** -0.5)

    size, vocab, drafted = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    num_q, num_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    num_read = len(config["eagle_aux_hidden_state_layer_ids"]) * config.get("target_hidden_size", size)
    tensors = {
        "fc.weight": make(size, num_read),
        "midlayer.hidden_norm.weight": 1 + make(size),
        "midlayer.input_layernorm.weight": 1 + make(size),
        "midlayer.post_attention_layernorm.weight": 1 + make(size),
        "midlayer.self_attn.q_proj.weight": 2 * make(num_q, 2 * size),
        "midlayer.self_attn.k_proj.weight": 2 * make(num_kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": 2 * make(num_kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": 2 * make(size, num_q),
        "midlayer.mlp.gate_proj.weight": 2 * make(config["intermediate_size"], size),
        "midlayer.mlp.up_proj.weight": 2 * make(config["intermediate_size"], size),
        "midlayer.mlp.down_proj.weight": 2 * make(size, config["intermediate_size"]),
        "norm.weight": 1 + make(size),
        "lm_head.weight": 5 * make(drafted, size),
    }
    if drafted < vocab:
        token_ids = torch.arange(drafted) * (vocab // drafted)
        tensors["d2t"] = token_ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, token_ids, value=True)
    if has_embedding:
        tensors["embed_tokens.weight"] = make(vocab, size)
    return tensors


def write_checkpoint(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint without a tokenizer."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_counting_target(path: Path, num_kv_heads: int = HEADS) -> Path:
    """Write the counting model, with the demo model's tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    tensors = {
        "model.embed_tokens.weight": _one_hot(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _SHARPNESS * _after(1),
    }
    for layer in range(_LAYERS):
        for name, tensor in _idle_layer(HIDDEN, num_kv_heads).items():
            tensors[f"model.layers.{layer}.{name}"] = tensor
    write_checkpoint(path, config, tensors)
    for file in Path(demo_model_path()).glob("token*"):
        shutil.copy(file, path)
    return path


def write_counting_head(path: Path) -> Path:
    """Write a head that drafts what the counting model does.

    It reads a position's embedding, from which it predicts the next token but one. Its feed-forward part replaces the
    hidden state by that of the next token.
    """
    config = head_config(HIDDEN, VOCAB, intermediate_size=FEED_FORWARD, num_key_value_heads=HEADS, rms_norm_eps=1e-6)
    tensors = {f"midlayer.{name}": tensor for name, tensor in _idle_layer(2 * HIDDEN).items()}
    # the norm makes each of the two components that are 1 this large
    scale = (HIDDEN / 2) ** 0.5
    step = torch.zeros(HIDDEN, HIDDEN)
    step[:VOCAB, :VOCAB] = torch.eye(VOCAB).roll(STEP, 0) - torch.eye(VOCAB)
    gate = torch.zeros(FEED_FORWARD, HIDDEN)
    gate[:, _CONSTANT] = 20 / scale  # silu(20) is 20
    tensors |= {
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": step / scale / 20,
        "midlayer.mlp.down_proj.weight": torch.eye(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)], dim=1),
        "norm.weight": torch.ones(HIDDEN),
        # the head's first output has made one step
        "lm_head.weight": _SHARPNESS * _after(1),
    }
    return write_checkpoint(path, config, tensors)


def _one_hot() -> torch.Tensor:
    embed_VD = torch.zeros(VOCAB, HIDDEN)
    embed_VD[:, :VOCAB] = torch.eye(VOCAB)
    embed_VD[:, _CONSTANT] = 1
    return embed_VD


def _after(num_steps: int) -> torch.Tensor:
    """Rows that find the token that follows `num_steps` steps after one that is embedded."""
    rows_VD = torch.zeros(VOCAB, HIDDEN)
    rows_VD[:, :VOCAB] = torch.eye(VOCAB).roll(STEP * num_steps, 0)
    return rows_VD


def _idle_layer(num_inputs: int, num_kv_heads: int = HEADS) -> dict[str, torch.Tensor]:
    """A layer that adds nothing. `num_inputs`: of the query, key and value projections."""
    sizes = {"q": HEADS, "k": num_kv_heads, "v": num_kv_heads}
    tensors = {
        f"self_attn.{name}_proj.weight": torch.zeros(HIDDEN // HEADS * size, num_inputs) for name, size in sizes.items()
    }
    tensors |= {f"mlp.{name}_proj.weight": torch.zeros(FEED_FORWARD, HIDDEN) for name in ("gate", "up")}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {"self_attn.o_proj.weight": torch.zeros(HIDDEN, HIDDEN)}
    return tensors | {"mlp.down_proj.weight": torch.zeros(HIDDEN, FEED_FORWARD)}
