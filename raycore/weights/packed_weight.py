"""Weights of linear layers in integers of 4 or 8 bits, packed into words, and how numbers are made of them.

Every layout of a checkpoint is brought to this one. Its integers are unsigned: those that a checkpoint has as -8 to 7
are 0 to 15 here. Numbers of 4 and 8 bits in floating point are packed, too: see `quantization.Code`. Shape suffixes:
O outputs of the layer, I its inputs, W words of an output's integers, G groups of inputs that share a scale, R some
rows, N anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raycore.models.quantization import Code

WORD_BITS = 32
E2M1_INTEGERS = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=torch.uint8)
"""By the 4 bits of a number in E2M1: twice the number, plus 12."""
NUMBERS_AT_A_TIME = 1 << 22
"""A weight is made numbers in blocks of rows of about this many, because the formulas need copies in float32."""


@dataclass
class PackedWeight:
    """The weight of a linear layer: `(integer - zero) · scale`, where both depend on the output and the input's group.
    With the code `affine`, `integer · scale + zero`, and with `e4m3`, `number · scale`.

    The words may be a view of a mapped file, so that rows are read when they are dequantized.
    """

    words_OW: Tensor
    """int32: each holds 32 / `bits` integers of neighboring inputs, the first of them in the lowest bits."""
    bits: int
    """4 or 8."""
    offset: int
    """Number of integers at the beginning of each row that belong to no input, because a word can't be cut."""
    num_inputs: int
    scales_OG: Tensor
    """Any floating-point dtype."""
    zeros_OG: Tensor
    """uint8: the integers that stand for zero. With the code `affine`, float32: the numbers that the integer 0 stands
    for. May have one row, or one column, for all."""
    groups_I: Tensor | None
    """int64: the group of each input. None: there is only one group."""
    code: Code = "integer"

    @property
    def shape(self) -> torch.Size:
        """Number of outputs and of inputs."""
        return torch.Size((len(self.words_OW), self.num_inputs))

    def __getitem__(self, rows: slice) -> PackedWeight:
        """Return some of the rows. They share this weight's memory."""
        zeros_RG = self.zeros_OG if len(self.zeros_OG) == 1 else self.zeros_OG[rows]
        return replace(self, words_OW=self.words_OW[rows], scales_OG=self.scales_OG[rows], zeros_OG=zeros_RG)

    def integers(self) -> Tensor:
        """Return the unsigned integers, uint8[O, I]."""
        codes_OI = self.codes()
        if self.code != "e2m1":
            return codes_OI
        return E2M1_INTEGERS.to(codes_OI.device).index_select(0, codes_OI.flatten().int()).view_as(codes_OI)

    def codes(self) -> Tensor:
        """Return what is stored, uint8[O, I]."""
        return unpack(self.words_OW, self.bits)[:, self.offset : self.offset + self.num_inputs]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, [O, I]. They are computed in float32 and rounded once."""
        integers_OI = self.codes().view(torch.float8_e4m3fn) if self.code == "e4m3" else self.integers()
        integers_OI = integers_OI.float()
        zeros_OG, scales_OG = self.zeros_OG.float(), self.scales_OG.float()
        if self.groups_I is not None:  # index_select() takes a quarter of the time of indexing
            zeros_OG = zeros_OG if zeros_OG.shape[1] == 1 else zeros_OG.index_select(1, self.groups_I)
            scales_OG = scales_OG.index_select(1, self.groups_I)
        if self.code == "affine":
            return integers_OI.mul_(scales_OG).add_(zeros_OG).to(dtype)
        if self.code == "e4m3":
            return integers_OI.mul_(scales_OG).to(dtype)
        return integers_OI.sub_(zeros_OG).mul_(scales_OG).to(dtype)

    def dequantized_blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows, some at a time: which ones, and their numbers."""
        num_rows = max(1, NUMBERS_AT_A_TIME // max(1, self.num_inputs))
        for start in range(0, len(self.words_OW), num_rows):
            rows = slice(start, min(start + num_rows, len(self.words_OW)))
            yield rows, self[rows].dequantize(dtype)


def unpack(words_NW: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of `bits` bits in int32 words, lowest bits first, as uint8[N, W · 32 / bits]."""
    # contiguous() would leave a single word of each row with a stride that view() doesn't take
    bytes_NB = words_NW.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return bytes_NB
    return torch.stack((bytes_NB & 15, bytes_NB >> 4), dim=-1).flatten(1)


def pack(integers_NI: Tensor, bits: int) -> Tensor:
    """Return unsigned integers, uint8[N, I], in int32 words, as `unpack` takes them. The last word may not be full."""
    missing = -integers_NI.shape[1] % (WORD_BITS // bits)
    bytes_NB = torch.nn.functional.pad(integers_NI, (0, missing))
    if bits == 4:
        bytes_NB = bytes_NB[:, 0::2] | (bytes_NB[:, 1::2] << 4)
    return bytes_NB.contiguous().view(torch.int32)
