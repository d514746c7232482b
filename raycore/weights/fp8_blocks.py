"""Reads weights in fp8 whose scales belong to blocks of outputs and inputs, 128 × 128 in DeepSeek's checkpoints.

A scale of each output, or of all of them, is that of a block, too. A rank's part may begin and end inside blocks. Shape
suffixes: O outputs of the part, I its inputs, B blocks of outputs, G blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raycore.models.quantization import WeightScheme
from raycore.weights.checkpoint_reader import READABLE, CheckpointReader
from raycore.weights.fp8_weight import FP8
from raycore.weights.packed_weight import NUMBERS_AT_A_TIME, PackedWeight, pack
from raycore.weights.weight import Part

EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
"""The dtypes of scales that are powers of two."""


@dataclass
class Fp8Blocks:
    """A part of a weight: `values_OI · scales_BG[blocks_O][:, blocks_I]`. The values may be a view of a mapped file."""

    values_OI: Tensor
    """float8_e4m3fn"""
    scales_BG: Tensor
    """float32: those of all blocks."""
    blocks_O: Tensor
    """int64: the block of each output."""
    blocks_I: Tensor
    """int64: the block of each input."""

    def dequantized_blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows, some at a time: which ones, and their numbers. They are computed in float32 and rounded
        once."""
        num_outputs, num_inputs = self.values_OI.shape
        num_rows = max(1, NUMBERS_AT_A_TIME // max(1, num_inputs))
        scales_BI = self.scales_BG.index_select(1, self.blocks_I)
        for start in range(0, num_outputs, num_rows):
            rows = slice(start, min(start + num_rows, num_outputs))
            scales_RI = scales_BI.index_select(0, self.blocks_O[rows])
            yield rows, scales_RI.mul_(self.values_OI[rows].float()).to(dtype)

    def packed(self) -> PackedWeight:
        """Return the weight with a scale for each output and each block of inputs.

        The scales of an output that has NaN become NaN: kernels know no other numbers than those of E4M3.
        """
        first = int(self.blocks_I[0]) if len(self.blocks_I) else 0
        own = slice(first, int(self.blocks_I[-1]) + 1 if len(self.blocks_I) else 0)
        scales_OG = self.scales_BG[:, own].index_select(0, self.blocks_O)
        bytes_OI = self.values_OI.contiguous().view(torch.uint8) + 0  # copied, because words can't lie at any byte
        sizes_O = (bytes_OI & 127).amax(dim=1) if bytes_OI.numel() else torch.zeros(len(bytes_OI))
        scales_OG[sizes_O == 127] = torch.nan
        zeros_OG = torch.zeros(1, 1, dtype=torch.uint8)
        stored = scales_OG, zeros_OG, self.blocks_I - first, "e4m3"
        return PackedWeight(pack(bytes_OI, 8), 8, 0, bytes_OI.shape[1], *stored)


def read_fp8_blocks(
    reader: CheckpointReader, name: str, scheme: WeightScheme, shape: tuple[int, ...], part: Part
) -> Fp8Blocks:
    """Read a part of the weight `name`, whose last dimensions are outputs and inputs, after that of experts, if all of
    a layer are in one tensor.

    Args:
        shape: of the whole weight.
        part: the expert, if there are some, outputs and inputs. Both may have a step.

    Raises:
        InvalidCheckpoint: a tensor is missing, or has another shape or dtype.
    """
    assert scheme.block is not None
    whole, sizes = slice(None), shape[-2:]
    *expert, outputs, inputs = (*part, *[whole] * (len(shape) - len(part)))
    values_OI = reader.view(scheme.tensor(name, scheme.numbers), shape, (*expert, outputs, inputs), (FP8,))
    blocks_O, blocks_I = (
        torch.arange(size)[own] // block
        for size, own, block in zip(sizes, (outputs, inputs), scheme.block, strict=True)
    )
    num_blocks = (-(-size // block) for size, block in zip(sizes, scheme.block, strict=True))
    stored = scheme.tensor(name, scheme.scales)
    scales = reader.view(stored, (*shape[:-2], *num_blocks), (*expert, whole, whole), (*READABLE, *EXPONENTS))
    return Fp8Blocks(values_OI, as_floats(scales), blocks_O, blocks_I)


def as_floats(scales: Tensor) -> Tensor:
    """Return scales in float32. Bytes are the exponents of powers of two, plus 127."""
    return scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales.float()
