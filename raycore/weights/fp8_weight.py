"""Weights of linear layers in 8-bit floating point, and how numbers are rounded to it.

The format is e4m3 ("fn": without infinities): 3 bits of mantissa, magnitudes from 2⁻⁹ to 448. Each row has a scale of
its own, so that its largest number becomes 448. Shape suffixes: O outputs of the layer, I its inputs, R some rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Rows of zeros get this scale. Smaller ones would not be normal numbers."""
_NUMBERS_AT_A_TIME = 1 << 24
"""A tensor is quantized in blocks of rows of about this many numbers, because the formulas need float32 copies."""


@dataclass
class Fp8Weight:
    """The weight of a linear layer: `values_OI · scales_O`, row by row."""

    values_OI: Tensor
    """float8_e4m3fn"""
    scales_O: Tensor
    """float32"""

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, device: torch.device) -> Fp8Weight:
        """Allocate a weight of this size."""
        values_OI = torch.empty(num_rows, num_columns, dtype=FP8, device=device)
        return cls(values_OI, torch.empty(num_rows, dtype=torch.float32, device=device))

    def __getitem__(self, rows: slice) -> Fp8Weight:
        """Return some of the rows. They share this weight's memory."""
        return Fp8Weight(self.values_OI[rows], self.scales_O[rows])

    @property
    def device(self) -> torch.device:
        return self.values_OI.device

    @property
    def shape(self) -> torch.Size:
        """Number of outputs and of inputs."""
        return self.values_OI.shape

    def numel(self) -> int:
        """Return the number of values."""
        return self.values_OI.numel()

    def to(self, device: torch.device) -> Fp8Weight:
        """Return this weight on `device`."""
        return Fp8Weight(self.values_OI.to(device), self.scales_O.to(device))

    def quantize_(self, numbers_OI: Tensor) -> None:
        """Set the weight to `numbers_OI`, which are on the same device, rounded."""
        num_rows = max(1, _NUMBERS_AT_A_TIME // max(1, numbers_OI.shape[1]))
        for start in range(0, len(numbers_OI), num_rows):
            rows = slice(start, start + num_rows)
            values_RI, scales_R1 = quantize_rows(numbers_OI[rows])
            self.values_OI[rows] = values_RI
            self.scales_O[rows] = scales_R1.view(-1)


def quantize_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x_RI` in fp8, [R, I], and the float32 scale of each row, [R, 1]. `values · scales` is nearly `x_RI`.

    A number's error is at most 1/16 of it, or 2⁻¹⁰ of the row's scale for the smallest numbers. The formulas are
    computed in float32.
    """
    x_RI = x_RI.float()
    scales_R1 = (x_RI.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=_LEAST_SCALE)
    # rounding may give a bit more than the largest number, which would become NaN
    return (x_RI / scales_R1).clamp_(-LARGEST, LARGEST).to(FP8), scales_R1
