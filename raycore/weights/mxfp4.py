"""Reads experts in MXFP4: numbers of 4 bits in E2M1, of which 32 neighboring inputs share a power of two as a scale.

The format is in the OCP Microscaling Formats (MX) Specification 1.0. Shape suffixes as in `packed_weight`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.models.quantization import MXFP4_GROUP
from raycore.parts.experts.models import MXFP4_NUMBERS, MXFP4_SCALES
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.packed_weight import PackedWeight

_EXPONENT_BIAS = 127
_MIDDLE = 12
"""The integer that stands for 0: see `packed_weight.E2M1_INTEGERS`."""


def read_mxfp4(
    reader: CheckpointReader, name: str, shape: tuple[int, int, int], expert: int, outputs: slice, inputs: slice
) -> PackedWeight:
    """Read a part of one expert of the stacked weight `name`.

    Args:
        shape: of the whole weight: number of experts, of outputs and of inputs.
        outputs: those that are read. May have a step.
        inputs: those that are read.

    Raises:
        InvalidCheckpoint: a tensor is missing, or has another shape or dtype.
    """
    num_experts, num_outputs, num_inputs = shape
    first, end, _ = inputs.indices(num_inputs)
    groups = slice(first // MXFP4_GROUP, -(-end // MXFP4_GROUP))
    stored = num_experts, num_outputs, num_inputs // MXFP4_GROUP
    part = expert, outputs, groups
    bytes_OGB = reader.view(name + MXFP4_NUMBERS, (*stored, MXFP4_GROUP // 2), part, (torch.uint8,))
    scales_OG = _scales(reader.view(name + MXFP4_SCALES, stored, part, (torch.uint8,)))
    offset = first - groups.start * MXFP4_GROUP
    groups_I = torch.arange(offset, offset + end - first) // MXFP4_GROUP
    zeros_11 = torch.full((1, 1), _MIDDLE, dtype=torch.uint8)
    # cloned, because a file's bytes may lie where words can't
    words_OW = bytes_OGB.flatten(1).clone(memory_format=torch.contiguous_format).view(torch.int32)
    return PackedWeight(words_OW, 4, offset, end - first, scales_OG, zeros_11, groups_I, "e2m1")


def _scales(exponents_OG: Tensor) -> Tensor:
    """Return the scales of integers, which are twice the numbers."""
    return torch.ldexp(torch.full(exponents_OG.shape, 0.5), exponents_OG.int() - _EXPONENT_BIAS)
