"""The interface of encoders of images, and which one a model has."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from raycore.layers.operations import Operations
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.checkpoint.vision_tensors import divides
from raycore.parts.images.models import VisionSpec
from raycore.parts.images.vision.blocks import VisionParts
from raycore.parts.images.vision.grids import Grid
from raycore.parts.images.vision.qwen import Qwen2_5Tower, Qwen3Tower
from raycore.parts.images.vision.siglip import SiglipTower
from raycore.parts.images.weights import VisionWeights


class Tower(Protocol):
    """One tensor-parallel rank's part of an encoder. All ranks encode the same images in the same order."""

    def __call__(self, values: Tensor, grid: Grid) -> Tensor:
        """Return what is computed of one image, [tokens, `VisionSpec.embedding_width`].

        Args:
            values: of the shape that `VisionSpec.input_shape` says, on the device, in any data type.
        """
        ...


def make_tower(spec: VisionSpec, weights: VisionWeights, operations: Operations, ranks: TensorParallel) -> Tower:
    """Return the encoder with a rank's weights. `ranks`: all tensor-parallel ranks, which may not divide it."""
    parts = VisionParts(spec, weights, operations, ranks if divides(spec, ranks.size) else TensorParallel())
    towers = {"qwen2_5_vl": Qwen2_5Tower, "qwen3_vl": Qwen3Tower, "siglip": SiglipTower}
    return towers[spec.kind](parts)
