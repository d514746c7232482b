"""Writes random LoRA adapters, as PEFT writes them. They change the model enough that other tokens come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raycore import LoRARequest

_STRENGTH = 0.5
"""The standard deviation of a change of weights, if a layer's inputs were as many as its weights' variance says."""


def write_adapters(model: str | Path, directory: Path, count: int, rank: int) -> list[LoRARequest]:
    """Write adapters of all linear layers of the checkpoint in the directory `model`. Returns what requests name."""
    found: list[LoRARequest] = []
    for number in range(1, count + 1):
        path = directory / f"adapter-{number}"
        _write(model, path, number, rank)
        found.append(LoRARequest(path.name, number, str(path)))
    return found


def _write(model: str | Path, path: Path, seed: int, rank: int) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    shapes = _shapes(config)
    for layer in range(config["num_hidden_layers"]):
        for module, (outputs, inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            a_RI = torch.randn(rank, inputs, generator=random) / inputs**0.5
            b_OR = torch.randn(outputs, rank, generator=random) * (_STRENGTH / rank**0.5)
            tensors[f"{name}A.weight"], tensors[f"{name}B.weight"] = a_RI, b_OR
    path.mkdir(parents=True)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    modules = sorted({module.partition(".")[2] for module in shapes})
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(written))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each linear layer of a decoder layer."""
    hidden, between, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (between, hidden),
        "mlp.up_proj": (between, hidden),
        "mlp.down_proj": (hidden, between),
    }
