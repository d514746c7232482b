"""Linear layers that native kernels compute with weights in integers of 4 or 8 bits, or in fp8.

Each row of the input is rounded to integers of 8 or 16 bits, with a scale of its own, or with one for each group of
inputs. Products of integers are exact. So a row's result doesn't depend on other rows, and has the same bits with every
instruction set. With weights in fp8 (the code `e4m3`), rows aren't rounded: results have the bits of the same layer
with its numbers in float32. Shape suffixes: O outputs, P outputs rounded up to whole panels, I inputs, W words of an
output's integers, G groups of inputs, n panels, p outputs of a panel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.kernels.gates import native_gate_arguments
from raycore.layers.panels import PANEL_OUTPUTS, one_after_the_other, side_by_side, unpack_panels
from raycore.models.quantization import Code
from raycore.models.spec import Gate
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight


class _Packed:
    """A weight and a bias as the kernels take them."""

    def __init__(self, weight: IntegerWeight, bias_O: Tensor | None) -> None:
        self.num_outputs = weight.shape[0]
        words_OW = _spread(weight.words_OW) if weight.bits == 4 else weight.words_OW
        if weight.code == "e4m3":
            packed_PW = torch.ops.raycore.pack_linear.default(words_OW.view(torch.uint8))
        else:  # only moved, as words of 4 bytes
            packed_PW = torch.ops.raycore.pack_linear.default(words_OW.view(torch.float32)).view(torch.int32)
        zeros_nGp = _in_panels(weight.zeros_OG)
        if weight.code == "e4m3" or (weight.code != "affine" and (weight.zeros_OG == weight.middle).all()):
            zeros_nGp = zeros_nGp.new_empty(0)
        bias_O = torch.empty(0) if bias_O is None else bias_O
        self._tensors = packed_PW, _in_panels(weight.scales_OG), zeros_nGp, bias_O
        row_format = weight.row_bits, weight.row_group_size or 0
        self._numbers = weight.bits, *row_format, weight.group_size, weight.code == "e2m1"
        self._code: Code = weight.code
        self._middle = weight.middle

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """What all kernels take after the rows."""
        return *self._tensors, *self._numbers

    def weight(self) -> IntegerWeight:
        """Return a copy of the weight."""
        packed_PW, scales_nGp, zeros_nGp, _ = self._tensors
        bits, row_bits, row_group_size, group_size, _ = self._numbers
        words_OW = unpack_panels(packed_PW)[: self.num_outputs]
        if self._code == "e4m3":  # contiguous() would leave a single word with a stride that view() doesn't take
            words_OW = words_OW.clone(memory_format=torch.contiguous_format).view(torch.int32)
        scales_OG = _in_rows(scales_nGp)[: self.num_outputs]
        if zeros_nGp.numel():
            zeros_OG = _in_rows(zeros_nGp)[: self.num_outputs]
        else:
            zeros_OG = torch.full_like(scales_OG, self._middle, dtype=torch.uint8)
        words_OW = _gather(words_OW) if bits == 4 else words_OW
        stored = words_OW, bits, group_size, scales_OG, zeros_OG
        return IntegerWeight(*stored, row_bits, self._code, row_group_size or None)

    def bias(self) -> Tensor | None:
        """Return the bias."""
        return self._tensors[-1] if self._tensors[-1].numel() else None

    def numbers(self, outputs_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of some outputs, [T, I]. They are computed in float32 and rounded once."""
        packed_PW, scales_nGp, zeros_nGp, _ = self._tensors
        bits, _, _, group_size, _ = self._numbers
        num_outputs, num_words = len(outputs_T), packed_PW.shape[1]
        at = outputs_T // PANEL_OUTPUTS, slice(None), outputs_T % PANEL_OUTPUTS
        codes_TWi = packed_PW.view(-1, num_words, PANEL_OUTPUTS)[at].view(torch.uint8).view(num_outputs, num_words, 4)
        if bits == 4:  # see _spread
            codes_TWi = torch.cat((codes_TWi & 15, codes_TWi >> 4), dim=2)
        scales_TG1 = scales_nGp[at].unsqueeze(2)
        integers_TGg = codes_TWi.view(num_outputs, scales_TG1.shape[1], group_size).float()
        if self._code == "affine":
            numbers_TGg = integers_TGg.mul_(scales_TG1).add_(zeros_nGp[at].unsqueeze(2))
        else:
            zeros = zeros_nGp[at].unsqueeze(2) if zeros_nGp.numel() else self._middle
            numbers_TGg = integers_TGg.sub_(zeros).mul_(scales_TG1)
        return numbers_TGg.flatten(1).to(dtype)


class IntegerLinear:
    """A linear layer with a weight in integers."""

    def __init__(self, weight: IntegerWeight, bias_O: Tensor | None) -> None:
        self._packed = _Packed(weight, bias_O)
        self._arguments = self._packed.arguments
        self._integer_linear = torch.ops.raycore.integer_linear.default
        self._add_integer_linear = torch.ops.raycore.add_integer_linear.default

    @property
    def weight(self) -> IntegerWeight:
        return self._packed.weight()

    @property
    def bias(self) -> Tensor | None:
        return self._packed.bias()

    @property
    def num_outputs(self) -> int:
        return self._packed.num_outputs

    def numbers(self, outputs_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight's rows of some outputs, [T, I], as `IntegerWeight.dequantize` would. Groups must be whole,
        and the code neither `e2m1` nor `e4m3`."""
        return self._packed.numbers(outputs_T, dtype)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._integer_linear(x_TI, *self._arguments, self._packed.num_outputs)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        self._add_integer_linear(x_TI, *self._arguments, residual_TO)
        return residual_TO


class IntegerEmbedding:
    """The embedding of a model whose head has the same weight, which is in memory once: in the head's integers."""

    def __init__(self, head: IntegerLinear, dtype: torch.dtype) -> None:
        """`dtype`: of the embeddings."""
        self._head = head
        self._dtype = dtype

    @property
    def weight(self) -> IntegerWeight:
        return self._head.weight

    def __len__(self) -> int:
        return self._head.num_outputs

    def index_select(self, dim: int, rows_T: Tensor) -> Tensor:
        """Return the embeddings of some rows, [T, D]. Takes the place of a tensor's method, so `dim` is 0."""
        assert dim == 0, "an embedding is looked up by rows"
        return self._head.numbers(rows_T, self._dtype)


class LinearOfParts:
    """A linear layer with a weight whose parts have integers of several forms."""

    def __init__(self, weight: IntegerParts, bias_O: Tensor | None) -> None:
        self._parts = [
            IntegerLinear(part, None if bias_O is None else bias_O[rows].contiguous()) for rows, part in weight.placed()
        ]

    @property
    def weight(self) -> IntegerParts:
        return IntegerParts([part.weight for part in self._parts])

    @property
    def bias(self) -> Tensor | None:
        biases = [part.bias for part in self._parts]
        return torch.cat([each for each in biases if each is not None]) if biases[0] is not None else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.cat([part(x_TI) for part in self._parts], dim=1)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))


class GatedIntegerLinear:
    """A gated layer with a weight in integers."""

    def __init__(self, gate_up: IntegerWeight, bias_O: Tensor | None, gate: Gate = "silu") -> None:
        bias_O = None if bias_O is None else side_by_side(bias_O)
        self._packed = _Packed(gate_up.map_tensors(side_by_side), bias_O)
        self._arguments = (*self._packed.arguments, *native_gate_arguments(gate))
        self._gated_integer_linear = torch.ops.raycore.gated_integer_linear.default

    @property
    def weight(self) -> IntegerWeight:
        return self._packed.weight().map_tensors(one_after_the_other)

    @property
    def bias(self) -> Tensor | None:
        bias_O = self._packed.bias()
        return None if bias_O is None else one_after_the_other(bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gated_integer_linear(x_TI, *self._arguments)


def _in_panels(values_OG: Tensor) -> Tensor:
    """Return values of outputs and groups as [n, G, p]. Missing outputs have zeros."""
    missing = -len(values_OG) % PANEL_OUTPUTS
    values_PG = torch.nn.functional.pad(values_OG, (0, 0, 0, missing))
    return values_PG.view(-1, PANEL_OUTPUTS, values_OG.shape[1]).transpose(1, 2).contiguous()


def _in_rows(values_nGp: Tensor) -> Tensor:
    """The inverse of `_in_panels`. Keeps the rows that fill the last panel."""
    return values_nGp.transpose(1, 2).reshape(-1, values_nGp.shape[1])


def _spread(words: Tensor) -> Tensor:
    """Return words of eight 4-bit integers in another order: byte i has integers i and i + 4."""
    return _to_bytes(words & 0xFFFF) | (_to_bytes(words >> 16 & 0xFFFF) << 4)


def _gather(words: Tensor) -> Tensor:
    """The inverse of `_spread`."""
    return _from_bytes(words & 0x0F0F0F0F) | (_from_bytes(words >> 4 & 0x0F0F0F0F) << 16)


def _to_bytes(halves: Tensor) -> Tensor:
    """Return 4-bit integers, four in each word, in the lower halves of the word's bytes."""
    halves = (halves | halves << 8) & 0x00FF00FF
    return (halves | halves << 4) & 0x0F0F0F0F


def _from_bytes(words: Tensor) -> Tensor:
    """The inverse of `_to_bytes`."""
    words = (words | words >> 4) & 0x00FF00FF
    return (words | words >> 8) & 0xFFFF
