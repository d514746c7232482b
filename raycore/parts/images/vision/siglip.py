"""SigLIP with Gemma 3's projector: images of one size, and a fixed number of embeddings.

Shape suffixes: C channels, R rows and columns of patches, P patches, X values of a patch, D hidden size, T tokens.
Sources: "Sigmoid Loss for Language Image Pre-Training" (arXiv 2303.15343), and transformers' SigLIP and Gemma 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.parts.images.vision.blocks import VisionAttention, VisionBlock, VisionParts
from raycore.parts.images.vision.grids import Grid


class SiglipTower:
    """All patches attend to each other. Squares of patches are then averaged, normalized and projected."""

    def __init__(self, parts: VisionParts) -> None:
        spec, weights = parts.spec, parts.weights
        assert spec.image_size is not None
        assert spec.tokens_per_image is not None
        self._spec = spec
        patch_DX = weights["embeddings.patch_embedding.weight"].flatten(1)
        self._patches = parts.operations.linear(patch_DX, weights["embeddings.patch_embedding.bias"])
        self._dtype = patch_DX.dtype
        self._positions_PD = parts.weight("embeddings.position_embedding.weight")
        self._blocks = [_block(parts, f"encoder.layers.{layer}") for layer in range(spec.num_layers)]
        self._norm = parts.norm("post_layernorm")
        # a norm of Gemma adds 1 to its weights
        self._projector_norm = parts.operations.rms_norm(weights["projector.mm_soft_emb_norm.weight"], spec.norm_eps, 1)
        self._projector = parts.operations.linear(weights["projector.mm_input_projection_weight"].t().contiguous())
        self._num_rows = spec.image_size // spec.patch_size
        self._token_rows = round(spec.tokens_per_image**0.5)

    def __call__(self, values: Tensor, grid: Grid) -> Tensor:
        all_patches = [torch.arange(self._num_rows**2, device=values.device)[None]]
        h_PD = self._patches(self._patch_values(values.to(self._dtype))) + self._positions_PD
        for block in self._blocks:
            h_PD = block(h_PD, None, all_patches)
        side, size = self._token_rows, self._num_rows // self._token_rows
        squares = self._norm(h_PD).view(side, size, side, size, -1)
        averages_TD = squares.mean((1, 3)).view(side * side, -1)
        return self._projector(self._projector_norm(averages_TD))

    def _patch_values(self, values_CYX: Tensor) -> Tensor:
        """Return the values of each patch, [P, X], row by row."""
        size = self._spec.patch_size
        cut = values_CYX[:, : self._num_rows * size, : self._num_rows * size]
        patches = cut.reshape(len(cut), self._num_rows, size, self._num_rows, size)
        return patches.permute(1, 3, 0, 2, 4).reshape(self._num_rows**2, -1)


def _block(parts: VisionParts, block: str) -> VisionBlock:
    weight, bias = (
        torch.cat([parts.weights[f"{block}.self_attn.{name}_proj.{each}"] for name in "qkv"])
        for each in ("weight", "bias")
    )
    out = parts.linear(f"{block}.self_attn.out_proj", is_split=True)
    return VisionBlock(
        (parts.norm(f"{block}.layer_norm1"), parts.norm(f"{block}.layer_norm2")),
        VisionAttention(parts, parts.operations.linear(weight, bias), out),
        parts.activated(f"{block}.mlp.fc1"),
        parts.linear(f"{block}.mlp.fc2", is_split=True),
    )
