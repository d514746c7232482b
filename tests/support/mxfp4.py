"""Writes experts in MXFP4, as the checkpoints of gpt-oss have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""By their 4 bits, without the sign."""


def quantize(weight_EOI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers, uint8[E, O, I / 32, 16], and the scales' exponents plus 127, uint8[E, O, I / 32]."""
    groups = weight_EOI.float().unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3).clamp_(min=1e-30) / NUMBERS[-1]).log2().ceil()
    scaled = groups / exponents.exp2().unsqueeze(3)
    codes = (scaled.abs().unsqueeze(4) - NUMBERS).abs().argmin(4) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, float32[E, O, I]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    signs = 1.0 - 2.0 * (codes >> 3)
    return (NUMBERS[codes & 7] * signs * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(-2)


def quantize_experts(path: Path, plain: Path) -> None:
    """Change the checkpoint of gpt-oss in the directory `path`. Write it with the rounded numbers to `plain`."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    shutil.copytree(path, plain)
    rounded = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = quantize(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        rounded[name] = dequantize(blocks, scales).transpose(1, 2).contiguous()
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
