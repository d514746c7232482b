"""Checkpoints in fp8, named as DeepSeek's and Mistral's are, and the same numbers in float32."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore.weights.fp8_weight import FP8, LARGEST

BLOCK = (12, 24)
"""Sizes that divide neither all outputs nor all inputs of the tests' models."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight [..., O, I] in fp8, the scales of its blocks, and the numbers that these stand for."""
    (num_outputs, num_inputs), (outputs, inputs) = weight.shape[-2:], BLOCK
    padded = torch.nn.functional.pad(weight.float(), (0, -num_inputs % inputs, 0, -num_outputs % outputs))
    blocks = padded.unflatten(-1, (-1, inputs)).unflatten(-3, (-1, outputs))
    scales = blocks.abs().amax((-3, -1), keepdim=True) / LARGEST
    values = (blocks / scales).clamp(-LARGEST, LARGEST).to(FP8)

    def whole(each: Tensor) -> Tensor:
        return each.flatten(-2).flatten(-3, -2)[..., :num_outputs, :num_inputs].contiguous()

    return whole(values.float()).to(FP8), scales.squeeze(-1).squeeze(-2), whole(values.float() * scales)


def quantize_whole(weight: Tensor, scale_dims: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `quantize`, with one scale. `scale_dims`: that the scales have. Experts share one if 0."""
    every = tuple(range(weight.dim()))
    scales = weight.float().abs().amax((-2, -1) if scale_dims else every, keepdim=True) / LARGEST
    values = (weight.float() / scales).clamp(-LARGEST, LARGEST).to(FP8)
    shape = {0: (), 1: (-1,), 3: scales.shape}[scale_dims]
    return values, scales.reshape(shape), values.float() * scales


def write_blocks(path: Path, *, is_stacked: bool = False) -> tuple[Path, Path]:
    """Quantize the linear layers of the checkpoint at `path`. Return where the quantized one is, and its numbers.

    `is_stacked`: all experts of a layer are in one tensor.
    """
    fields = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    return _write(path, quantize, fields, is_stacked)


def write_static(path: Path, scale_dims: int) -> tuple[Path, Path]:
    """Do the same as `write_blocks`, with one scale for a weight and one for its inputs, and stacked experts.

    `scale_dims`: as in `quantize_whole`.
    """
    return _write(path, partial(quantize_whole, scale_dims=scale_dims), {"activation_scheme": "static"}, True)


def _write(
    path: Path, quantize: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], fields: dict[str, Any], is_stacked: bool
) -> tuple[Path, Path]:
    tensors = {name: each for file in sorted(path.glob("model*.safetensors")) for name, each in load_file(file).items()}
    tensors = stacked(tensors) if is_stacked else tensors
    stored, numbers = dict(tensors), dict(tensors)
    for name, each in tensors.items():
        if ".layers." in name and each.dim() > 1 and not name.endswith("mlp.gate.weight"):
            stored[name], scales, numbers[name] = quantize(each)
            stored[f"{name}_scale_inv"] = scales.contiguous()
            if fields["activation_scheme"] == "static":
                layer = name.removesuffix(".weight")
                stored[f"{layer}{'_' if layer == name else '.'}activation_scale"] = torch.ones_like(scales)
    config = json.loads((path / "config.json").read_text())
    written = path.with_name(f"{path.name} in fp8"), path.with_name(f"{path.name} as numbers")
    for to, content in zip(reversed(written), (numbers, stored), strict=True):
        to.mkdir()
        save_file(content, to / "model.safetensors", {"format": "pt"})
        shutil.copy(path / "tokenizer.json", to)
        (to / "config.json").write_text(json.dumps(config))
        config = config | {"quantization_config": {"quant_method": "fp8", **fields}}
    return written


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with all experts of a layer in two: gates, then the others that these multiply, and down."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, each in tensors.items():
        part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name)
        if part is None:
            found[name] = each
        else:
            experts.setdefault(part[1], {})[part[3], int(part[2])] = each
    for prefix, own in experts.items():
        gate, up, down = (
            torch.stack([own[kind, index] for index in range(len(own) // 3)]) for kind in ("gate", "up", "down")
        )
        found |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    return found
