"""Quantizes the linear layers of small checkpoints, experts included, as files of several tools have them.

The numbers are rounded to the nearest ones. Shape suffixes: O outputs of a layer, I its inputs, G groups of inputs, V
words of outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxfp4
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore.weights.packed_weight import pack

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""By its place in a word of AWQ, counted from the lowest bits: which one of eight neighboring outputs is there."""
LAYERS = re.compile(r".*(_proj|\.w[123])\.weight")
"""The layers that are quantized."""


def _rounded(weight_OI: Tensor, *, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers uint8[O, I] from 0 to 15, scales [O, G], and the integers uint8[O, G] that stand for zero."""
    groups_OGg = weight_OI.unflatten(1, (-1, GROUP))
    low_OG, high_OG = groups_OGg.amin(2).clamp(max=0), groups_OGg.amax(2).clamp(min=0)
    if symmetric:
        high_OG = torch.maximum(high_OG, -low_OG)
        scales_OG, zeros_OG = high_OG / 7, torch.full_like(high_OG, 8)
    else:
        scales_OG = (high_OG - low_OG) / 15
        zeros_OG = (-low_OG / scales_OG).round()
    scales_OG = scales_OG.half().float()
    integers_OGg = (groups_OGg / scales_OG.unsqueeze(2)).round() + zeros_OG.unsqueeze(2)
    return integers_OGg.clamp(0, 15).to(torch.uint8).flatten(1), scales_OG.half(), zeros_OG.to(torch.uint8)


def _packed_along_outputs(integers_OG: Tensor) -> Tensor:
    return pack(integers_OG.t().clone(memory_format=torch.contiguous_format), 4)


def _gptq(weight_OI: Tensor) -> dict[str, Tensor]:
    integers_OI, scales_OG, zeros_OG = _rounded(weight_OI)
    stored_OG = (zeros_OG - 1) & 15  # as the first tools had it
    return {
        "qweight": pack(integers_OI, 4).t(),
        "qzeros": _packed_along_outputs(stored_OG),
        "scales": scales_OG.t(),
        "g_idx": (torch.arange(weight_OI.shape[1]) // GROUP).int(),
    }


def _awq(weight_OI: Tensor) -> dict[str, Tensor]:
    def words(integers_NO: Tensor) -> Tensor:
        in_order = integers_NO.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)]
        return pack(in_order.flatten(1), 4)

    integers_OI, scales_OG, zeros_OG = _rounded(weight_OI)
    return {"qweight": words(integers_OI.t()), "qzeros": words(zeros_OG.t()), "scales": scales_OG.t()}


def _packed(weight_OI: Tensor) -> dict[str, Tensor]:
    integers_OI, scales_OG, _ = _rounded(weight_OI, symmetric=True)
    shape = torch.tensor(weight_OI.shape)
    return {"weight_packed": pack(integers_OI, 4), "weight_scale": scales_OG, "weight_shape": shape}


def _int8(weight_OI: Tensor) -> dict[str, Tensor]:
    scales_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight_OI / scales_O1).round().to(torch.int8), "weight_scale": scales_O1}


def _mxfp4(weight_OI: Tensor) -> dict[str, Tensor]:
    blocks, exponents = mxfp4.quantize(weight_OI.unsqueeze(0))
    return {"weight_packed": blocks[0].flatten(1), "weight_scale": exponents[0]}


def _nvfp4(weight_OI: Tensor) -> dict[str, Tensor]:
    """Scales of 16 numbers in fp8, which one of the whole weight divides."""
    groups = weight_OI.unflatten(1, (-1, 16))
    largest_OG = groups.abs().amax(2)
    whole = 448 * 6 / largest_OG.max()
    scales_OG = (largest_OG / 6 * whole).to(torch.float8_e4m3fn)
    scaled = groups / (scales_OG.float() / whole).clamp(min=1e-30).unsqueeze(2)
    codes = (scaled.abs().unsqueeze(3) - mxfp4.NUMBERS).abs().argmin(3) + 8 * (scaled < 0)
    codes_OI = codes.flatten(1).to(torch.uint8)
    return {
        "weight_packed": codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4,
        "weight_scale": scales_OG,
        "weight_global_scale": whole.reshape(1),
    }


def _group(layout: str, **weights: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "strategy": "group", **weights}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if layout == "int-quantized" else None,
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
    }


Tool = tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]
FORMATS: dict[str, Tool] = {
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (_packed, _group("pack-quantized", num_bits=4, group_size=GROUP)),
    "int8": (_int8, _group("int-quantized", num_bits=8, strategy="channel")),
    "mxfp4": (_mxfp4, _group("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)),
    "nvfp4": (_nvfp4, _group("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)),
}
"""By name: what makes a layer's tensors, and quantization_config of config.json."""


def quantize_layers(path: Path, name: str, layers: re.Pattern[str] = LAYERS) -> None:
    """Quantize these layers of the checkpoint in a directory, in one of `FORMATS`."""
    make, described = FORMATS[name]
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    for weight in [each for each in tensors if layers.fullmatch(each)]:
        own = make(tensors.pop(weight))
        layer = weight.removesuffix(".weight")
        tensors |= {f"{layer}.{each}": tensor.contiguous() for each, tensor in own.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
