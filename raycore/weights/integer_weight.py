"""Weights of linear layers that stay in integers of 4 or 8 bits, or in fp8, while a model computes.

All layouts of checkpoints that `packed_weight` reads become this one. Shape suffixes: O outputs of the layer, I its
inputs, W words of an output's integers, G groups of inputs that share a scale, R some rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raycore.errors import InvalidCheckpoint
from raycore.models.quantization import Code, RowBits, WeightScheme
from raycore.weights.fp8_weight import FP8, LARGEST
from raycore.weights.packed_weight import E2M1_INTEGERS, NUMBERS_AT_A_TIME, WORD_BITS, PackedWeight, pack

BLOCK_INPUTS = 256
"""Kernels add up the products of so many inputs exactly. Groups of integers divide this, or are a multiple of it."""
_LEAST_GROUP = 16
ROW_GROUP = 32
"""Inputs of a row that share a scale if it is rounded to 8 bits on request, as in llama.cpp and OpenVINO. Fewer if the
weight's groups are smaller."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Rows of zeros get this scale. Smaller ones would not be normal numbers."""
_ZERO_DTYPES: dict[Code, torch.dtype] = {"affine": torch.float32}
"""Of codes whose zeros aren't bytes."""


@dataclass
class IntegerWeight:
    """The weight of a linear layer: `(integer - zero) · scale`, where both depend on the output and the input's group.
    With the code `affine`, `integer · scale + zero`, and with `e4m3`, `number · scale`.

    Integers are unsigned.
    """

    words_OW: Tensor
    """int32: each holds 32 / `bits` integers of neighboring inputs, the first of them in the lowest bits."""
    bits: int
    """4 or 8."""
    group_size: int
    """Number of neighboring inputs that share a scale."""
    scales_OG: Tensor
    """float32"""
    zeros_OG: Tensor
    """uint8: the integers that stand for zero. With the code `affine`, float32: the numbers that the integer 0 stands
    for."""
    row_bits: RowBits
    """The layer's input is rounded to integers of so many bits. With the code `e4m3`, it isn't rounded."""
    code: Code = "integer"
    """With `e2m1`, all zeros are `middle`. With `e4m3`, they are not used."""
    row_group_size: int | None = None
    """Number of neighboring inputs of a row that share a scale when they are rounded. None: all of them do."""

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_columns: int,
        bits: int,
        group_size: int,
        row_bits: RowBits,
        device: torch.device,
        code: Code = "integer",
        row_group_size: int | None = None,
    ) -> IntegerWeight:
        """Allocate a weight of this size."""
        num_groups = -(-num_columns // group_size)
        return cls(
            torch.empty(num_rows, num_columns * bits // WORD_BITS, dtype=torch.int32, device=device),
            bits,
            group_size,
            torch.empty(num_rows, num_groups, dtype=torch.float32, device=device),
            torch.zeros(num_rows, num_groups, dtype=_ZERO_DTYPES.get(code, torch.uint8), device=device),
            row_bits,
            code,
            row_group_size,
        )

    @classmethod
    def stored(
        cls, scheme: WeightScheme, group_size: int, size: tuple[int, int], device: torch.device, *, short_rows: bool
    ) -> IntegerWeight:
        """Allocate a weight for what is stored by `scheme`.

        Args:
            group_size: see `kept_group_size`.
            size: number of rows and of columns.
            short_rows: see `LinearFormats`.
        """
        code = scheme.kept_code
        if not short_rows or scheme.row_bits == 8 or code == "e4m3":
            return cls.empty(*size, scheme.bits, group_size, scheme.row_bits, device, code)
        row_group_size = min(group_size, ROW_GROUP) if size[1] > ROW_GROUP else None
        return cls.empty(*size, scheme.bits, group_size, 8, device, code, row_group_size)

    def __getitem__(self, rows: slice | int) -> IntegerWeight:
        """Return some of the rows, or one of several stacked weights. They share this weight's memory."""
        return self.map_tensors(lambda tensor: tensor[rows])

    @property
    def device(self) -> torch.device:
        return self.words_OW.device

    @property
    def shape(self) -> torch.Size:
        """Number of outputs and of inputs. Of stacked weights, their number comes first."""
        return torch.Size((*self.words_OW.shape[:-1], self.words_OW.shape[-1] * WORD_BITS // self.bits))

    @property
    def middle(self) -> int:
        """The integer that stands for zero, if all have the same. With the code `affine`, that which `quantize_` has
        stand for zero."""
        return int(E2M1_INTEGERS[0]) if self.code == "e2m1" else 1 << (self.bits - 1)

    def numel(self) -> int:
        """Return the number of integers."""
        return self.shape.numel()

    def to(self, device: torch.device) -> IntegerWeight:
        """Return this weight on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> IntegerWeight:
        """Return the weight with `change` applied to its tensors, each of which has a row for each output."""
        return replace(
            self, words_OW=change(self.words_OW), scales_OG=change(self.scales_OG), zeros_OG=change(self.zeros_OG)
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, [O, I]. They are computed in float32 and rounded once."""
        num_inputs = self.shape[1]
        groups_I = torch.arange(num_inputs, device=self.device) // self.group_size
        stored = self.scales_OG, self.zeros_OG, groups_I, self.code
        return PackedWeight(self.words_OW, self.bits, 0, num_inputs, *stored).dequantize(dtype)

    def fill_(self, weight: PackedWeight) -> None:
        """Set the weight to `weight`, which has the same code and the same numbers of bits, outputs and inputs.

        Raises:
            InvalidCheckpoint: the inputs of a group aren't neighbors.
        """
        if weight.offset == 0 and weight.words_OW.shape == self.words_OW.shape:
            self.words_OW.copy_(weight.words_OW)
        else:
            self.words_OW.copy_(pack(weight.codes(), self.bits))
        if weight.groups_I is None:
            groups_G = torch.zeros(self.scales_OG.shape[1], dtype=torch.int64)
        else:
            groups_G = weight.groups_I[:: self.group_size]
            if not torch.equal(groups_G.repeat_interleave(self.group_size)[: self.shape[1]], weight.groups_I):
                raise InvalidCheckpoint(
                    f"config.json says that {self.group_size} neighboring inputs share a scale, but the weights have "
                    "other groups: the weights and config.json are of different models"
                )
        self.scales_OG.copy_(weight.scales_OG.index_select(1, groups_G))
        zeros_OG = weight.zeros_OG if weight.zeros_OG.shape[1] == 1 else weight.zeros_OG.index_select(1, groups_G)
        self.zeros_OG.copy_(zeros_OG)

    def quantize_(self, numbers_OI: Tensor) -> None:
        """Set the weight to `numbers_OI`, rounded.

        With 8 bits, a number's error is at most 1/254 of the largest one of its group. Stacked weights are set in turn.
        """
        if numbers_OI.dim() == 3:
            for index, numbers in enumerate(numbers_OI):
                self[index].quantize_(numbers)
            return
        num_groups, num_inputs = self.scales_OG.shape[1], self.shape[1]
        missing = num_groups * self.group_size - num_inputs
        num_rows = max(1, NUMBERS_AT_A_TIME // max(1, num_inputs))
        largest = {"e2m1": self.middle, "e4m3": LARGEST}.get(self.code, self.middle - 1)
        for start in range(0, len(numbers_OI), num_rows):
            rows = slice(start, start + num_rows)
            numbers_RI = torch.nn.functional.pad(numbers_OI[rows].float(), (0, missing))
            groups_RGg = numbers_RI.view(len(numbers_RI), num_groups, self.group_size)
            scales_RG = (groups_RGg.abs().amax(dim=2) / largest).clamp_(min=_LEAST_SCALE)
            scaled_RGg = (groups_RGg / scales_RG.unsqueeze(2)).clamp_(-largest, largest)
            if self.code == "e4m3":
                codes_RGg = scaled_RGg.to(FP8).view(torch.uint8)
            else:
                codes_RGg = _e2m1_codes(scaled_RGg) if self.code == "e2m1" else scaled_RGg.round_().add_(self.middle)
            self.words_OW[rows] = pack(codes_RGg.to(torch.uint8).flatten(1)[:, :num_inputs], self.bits)
            self.scales_OG[rows] = scales_RG
        if self.code == "affine":
            torch.mul(self.scales_OG, -self.middle, out=self.zeros_OG)
        else:
            self.zeros_OG.fill_(self.middle)


def _e2m1_codes(doubled: Tensor) -> Tensor:
    """Return the nearest numbers in E2M1, as their 4 bits. `doubled`: twice the numbers, from -12 to 12."""
    positive = E2M1_INTEGERS[:8].float() - E2M1_INTEGERS[0]
    return torch.bucketize(doubled.abs(), (positive[1:] + positive[:-1]) / 2) + 8 * (doubled < 0)


def kept_group_size(scheme: WeightScheme, num_inputs: int, first_input: int) -> int | None:
    """Return the groups with which some inputs of a layer can be an `IntegerWeight`, or None if they can't.

    Args:
        num_inputs: how many neighboring inputs.
        first_input: the first of them.
    """
    if num_inputs % (WORD_BITS // scheme.bits) or scheme.is_ordered:
        return None
    stored_size = scheme.group_size if scheme.block is None else scheme.block[1]
    if stored_size is None:
        return num_inputs
    group_size = math.gcd(stored_size, first_input)
    if scheme.kept_code == "e4m3":
        group_size = 0 if group_size % 4 else group_size
    elif group_size % BLOCK_INPUTS:
        group_size = math.gcd(group_size, BLOCK_INPUTS)
    return group_size if group_size >= _LEAST_GROUP else None
