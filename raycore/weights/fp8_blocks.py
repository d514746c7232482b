"""Reads weights in fp8 whose scales belong to blocks of outputs and inputs, 128 × 128 in DeepSeek's checkpoints.

A rank's part may begin and end inside blocks. Shape suffixes: O outputs of the part, I its inputs, B blocks of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raycore.models.quantization import WeightScheme
from raycore.weights.checkpoint_reader import READABLE, CheckpointReader
from raycore.weights.fp8_weight import FP8
from raycore.weights.packed_weight import NUMBERS_AT_A_TIME
from raycore.weights.weight import Part

EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)
"""The dtypes of scales that are powers of two."""


@dataclass
class Fp8Blocks:
    """A part of a weight: `values_OI · scales_BI[blocks_O]`. The values may be a view of a mapped file."""

    values_OI: Tensor
    """float8_e4m3fn"""
    scales_BI: Tensor
    """float32: those of all blocks of outputs, for the part's inputs."""
    blocks_O: Tensor
    """int64: the block of each output."""

    def dequantized_blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows, some at a time: which ones, and their numbers. They are computed in float32 and rounded
        once."""
        num_outputs, num_inputs = self.values_OI.shape
        num_rows = max(1, NUMBERS_AT_A_TIME // max(1, num_inputs))
        for start in range(0, num_outputs, num_rows):
            rows = slice(start, min(start + num_rows, num_outputs))
            scales_RI = self.scales_BI.index_select(0, self.blocks_O[rows])
            yield rows, scales_RI.mul_(self.values_OI[rows].float()).to(dtype)


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
    values_OI = reader.view(name, shape, (*expert, outputs, inputs), (FP8,))
    blocks_O, blocks_I = (
        torch.arange(size)[own] // block
        for size, own, block in zip(sizes, (outputs, inputs), scheme.block, strict=True)
    )
    num_blocks = (-(-size // block) for size, block in zip(sizes, scheme.block, strict=True))
    stored = scheme.tensor(name, scheme.scales)
    scales = reader.view(stored, (*shape[:-2], *num_blocks), (*expert, whole, whole), (*READABLE, *EXPONENTS))
    return Fp8Blocks(values_OI, as_floats(scales).index_select(1, blocks_I), blocks_O)


def as_floats(scales: Tensor) -> Tensor:
    """Return scales in float32. Bytes are the exponents of powers of two, plus 127."""
    return scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales.float()
