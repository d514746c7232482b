"""LoRA adapters that PEFT writes, for a small model with random weights."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from configs import SPEC
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from raycore.demo import demo_model_path
from raycore.models.spec import ModelSpec

GRID = 64
"""Elements of the matrices are multiples of 1 / GRID."""


def make_adapter(spec: ModelSpec = SPEC, seed: int = 0, **options: Any) -> PeftModel:
    """Return a model with a random adapter. `options`: PEFT's.

    The matrices' elements have so few bits that products of them are exact in float32.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    with warnings.catch_warnings():
        # PEFT warns of adapters that most readers don't support, and that is what some of them are for
        warnings.simplefilter("ignore")
        model = get_peft_model(LlamaForCausalLM(config), LoraConfig(**(defaults | options)))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(GRID).round_().div_(GRID)
    return model


def save_adapter(path: Path, spec: ModelSpec = SPEC, seed: int = 0, **options: Any) -> PeftModel:
    """Write what `make_adapter` returns to the directory `path`."""
    model = make_adapter(spec, seed, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(path))
    return model


def adapted_modules(model: PeftModel) -> dict[tuple[int, str], Any]:
    """PEFT's linear layers that have an adapter, by layer and by name within it."""
    found: dict[tuple[int, str], Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layer, _, projection = name.removeprefix("base_model.model.model.layers.").partition(".")
            found[int(layer), projection] = module
    return found


def save_demo_adapter(
    directory: Path, seed: int, model_path: Path | str | None = None, **options: Any
) -> tuple[Path, Path]:
    """Write a random adapter for the demo model, or for the one in the directory `model_path`.

    Returns: the adapter's directory, and that of the model with the adapter merged into its weights.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path or demo_model_path(), dtype=torch.float32)
    torch.manual_seed(seed)
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(**(defaults | options)))
    adapter, merged = directory / f"adapter {seed}", directory / f"merged {seed}"
    adapted.save_pretrained(str(adapter))
    adapted.merge_and_unload().save_pretrained(str(merged))
    for file in Path(demo_model_path()).glob("*token*"):
        shutil.copy(file, merged)
    return adapter, merged
