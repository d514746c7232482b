"""The encoders of Qwen2.5-VL and Qwen3-VL, for images of any size.

Shape suffixes: P patches, X values of a patch, D hidden size, T tokens, M elements of the patches of one token, E size
of an embedding. Sources: "Qwen2.5-VL Technical Report" (arXiv 2502.13923), "DeepStack" (arXiv 2406.04334), and
transformers' modules of the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from raycore.parts.images.vision.blocks import GridRotation, VisionAttention, VisionBlock, VisionParts
from raycore.parts.images.vision.grids import (
    Grid,
    frame_windows,
    interpolate_positions,
    patch_positions,
    square_windows,
)


class _QwenTower:
    """What both have: patches, rotations by rows and columns, and layers."""

    def __init__(self, parts: VisionParts) -> None:
        spec = parts.spec
        assert spec.theta is not None
        self._spec = spec
        self._rotation = GridRotation(spec.theta, spec.hidden_size // spec.num_heads)
        patch_DX = parts.weights["patch_embed.proj.weight"].flatten(1)
        self._patches = parts.operations.linear(patch_DX, parts.weights.get("patch_embed.proj.bias"))
        self._dtype = patch_DX.dtype

    def _attention(self, parts: VisionParts, block: str) -> VisionAttention:
        weight, bias = (
            self._rotation.in_pairs(parts.weights[f"{block}.attn.qkv.{each}"]) for each in ("weight", "bias")
        )
        return VisionAttention(
            parts, parts.operations.linear(weight, bias), parts.linear(f"{block}.attn.proj", is_split=True)
        )

    def _turns(self, grid: Grid, device: torch.device) -> Tensor:
        return self._rotation.turns(*patch_positions(grid, self._spec.merge_size)).to(device)


class Qwen2_5Tower(_QwenTower):  # noqa: N801
    """Patches attend to those of a square window, in a few layers to all. RMS norms, gated layers."""

    def __init__(self, parts: VisionParts) -> None:
        super().__init__(parts)
        self._blocks = [self._block(parts, f"blocks.{layer}") for layer in range(parts.spec.num_layers)]
        self._norm = parts.norm("merger.ln_q")
        self._merger = parts.linear("merger.mlp.0"), parts.linear("merger.mlp.2")

    def _block(self, parts: VisionParts, block: str) -> VisionBlock:
        return VisionBlock(
            (parts.norm(f"{block}.norm1"), parts.norm(f"{block}.norm2")),
            self._attention(parts, block),
            parts.gated(f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"),
            parts.linear(f"{block}.mlp.down_proj", is_split=True),
        )

    def __call__(self, values: Tensor, grid: Grid) -> Tensor:
        spec, device = self._spec, values.device
        assert spec.window_size is not None
        all_patches = [each.to(device) for each in frame_windows(grid)]
        windows = [each.to(device) for each in square_windows(grid, spec.merge_size, spec.window_size)]
        turns_P1C = self._turns(grid, device)
        h_PD = self._patches(values.to(self._dtype))
        for layer, block in enumerate(self._blocks):
            h_PD = block(h_PD, turns_P1C, all_patches if layer in spec.full_layers else windows)
        x_TM = self._norm(h_PD).view(-1, spec.hidden_size * spec.merge_size**2)
        return self._merger[1](functional.gelu(self._merger[0](x_TM)))


class Qwen3Tower(_QwenTower):
    """All patches of a frame attend to each other. Embeddings of positions, layer norms, results of several layers."""

    def __init__(self, parts: VisionParts) -> None:
        super().__init__(parts)
        self._positions_XD = parts.weight("pos_embed.weight")
        self._blocks = [self._block(parts, f"blocks.{layer}") for layer in range(parts.spec.num_layers)]
        self._merger = _Merger(parts, "merger", merges_first=False)
        self._deep_mergers = {
            layer: _Merger(parts, f"deepstack_merger_list.{index}", merges_first=True)
            for index, layer in enumerate(parts.spec.deepstack_layers)
        }

    def _block(self, parts: VisionParts, block: str) -> VisionBlock:
        return VisionBlock(
            (parts.norm(f"{block}.norm1"), parts.norm(f"{block}.norm2")),
            self._attention(parts, block),
            parts.activated(f"{block}.mlp.linear_fc1"),
            parts.linear(f"{block}.mlp.linear_fc2", is_split=True),
        )

    def __call__(self, values: Tensor, grid: Grid) -> Tensor:
        device = values.device
        all_patches = [each.to(device) for each in frame_windows(grid)]
        turns_P1C = self._turns(grid, device)
        h_PD = self._patches(values.to(self._dtype))
        h_PD = h_PD + interpolate_positions(self._positions_XD, grid, self._spec.merge_size)
        found: dict[int, Tensor] = {}
        for layer, block in enumerate(self._blocks):
            h_PD = block(h_PD, turns_P1C, all_patches)
            if layer in self._deep_mergers:
                found[layer] = self._deep_mergers[layer](h_PD)
        return torch.cat([self._merger(h_PD), *[found[layer] for layer in self._spec.deepstack_layers]], 1)


class _Merger:
    """Makes one embedding of each block of patches."""

    def __init__(self, parts: VisionParts, key: str, *, merges_first: bool) -> None:
        """`merges_first`: whether the norm is over all patches of a block together."""
        self._norm = parts.norm(f"{key}.norm")
        self._layers = parts.linear(f"{key}.linear_fc1"), parts.linear(f"{key}.linear_fc2")
        self._width = parts.spec.hidden_size * parts.spec.merge_size**2
        self._merges_first = merges_first

    def __call__(self, h_PD: Tensor) -> Tensor:
        """Return [T, E]."""
        x_TM = self._norm(h_PD.view(-1, self._width) if self._merges_first else h_PD).view(-1, self._width)
        return self._layers[1](functional.gelu(self._layers[0](x_TM)))
