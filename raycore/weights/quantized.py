"""Reads parts of quantized weights from a checkpoint, in the layouts of compressed-tensors, ModelOpt, GPTQ, AWQ and
TorchAO.

Each layout has several tensors for a layer, whose names and shapes this module knows. Of each tensor, only the part
that the requested outputs and inputs need is read, rounded to whole words and whole groups. Shape suffixes as in
`packed_weight`; V words of the outputs' integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from raycore.errors import InvalidCheckpoint
from raycore.models.quantization import WeightScheme
from raycore.weights.checkpoint_reader import READABLE, CheckpointReader
from raycore.weights.fp8_blocks import EXPONENTS, as_floats
from raycore.weights.fp8_weight import FP8
from raycore.weights.packed_weight import E2M1_INTEGERS, WORD_BITS, PackedWeight, pack, unpack

_SUFFIX = ".weight"
_INTEGERS = (torch.int64, torch.int32)
_WORD_BYTES = WORD_BITS // 8
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighboring outputs has its integer in a word of AWQ, counted from the lowest bits."""


def read_packed(
    reader: CheckpointReader, name: str, scheme: WeightScheme, shape: tuple[int, int], rows: slice, columns: slice
) -> PackedWeight:
    """Read a part of the weight `name`, which is stored as integers. The words may be views of the mapped file.

    Args:
        shape: of the whole weight: number of outputs and of inputs.
        rows: the outputs that are read.
        columns: the inputs that are read.

    Raises:
        InvalidCheckpoint: a tensor is missing, or has another shape or dtype.
    """
    return _LAYOUTS[scheme.layout](reader, name.removesuffix(_SUFFIX), scheme, shape, rows, columns).read()


class _Part:
    """A part of a layer's weight. Subclasses read it from one layout each."""

    _group_tensor = "weight_g_idx"

    def __init__(
        self,
        reader: CheckpointReader,
        layer: str,
        scheme: WeightScheme,
        shape: tuple[int, int],
        rows: slice,
        columns: slice,
    ) -> None:
        self._reader = reader
        self._layer = layer
        self._bits = scheme.bits
        self._scheme = scheme
        self._shape = shape
        self._rows = slice(*rows.indices(shape[0]))
        self._columns = slice(*columns.indices(shape[1]))
        self._num_groups = 1 if scheme.group_size is None else -(-shape[1] // scheme.group_size)
        self._groups, self._groups_I = self._find_groups()

    def read(self) -> PackedWeight:
        words_OW, offset = self._words()
        num_inputs = self._columns.stop - self._columns.start
        zeros_OG = self._zeros()
        stored = self._scales(), zeros_OG, self._groups_I, self._scheme.code
        return PackedWeight(words_OW, self._bits, offset, num_inputs, *stored)

    def _words(self) -> tuple[Tensor, int]:
        """Return `PackedWeight.words_OW` and `PackedWeight.offset`."""
        raise NotImplementedError

    def _scales(self) -> Tensor:
        raise NotImplementedError

    def _zeros(self) -> Tensor:
        raise NotImplementedError

    def _view(self, tensor: str, shape: tuple[int, ...], part: tuple[slice, ...], *dtypes: torch.dtype) -> Tensor:
        return self._reader.view(f"{self._layer}.{tensor}", shape, part, dtypes)

    def _num_words(self, num_integers: int) -> int:
        return -(-num_integers * self._bits // WORD_BITS)

    def _words_of(self, part: slice) -> tuple[slice, int]:
        """Return the words with a part of a row's integers, and how many others come before it in the first word."""
        in_word = WORD_BITS // self._bits
        return slice(part.start // in_word, self._num_words(part.stop)), part.start % in_word

    def _find_groups(self) -> tuple[slice, Tensor | None]:
        """Return the groups of the part's inputs, and each input's group, counted from the first of these."""
        size = self._scheme.group_size
        if size is None:
            return slice(0, 1), None
        groups_I = self._given_groups()
        if groups_I is None:
            groups_I = torch.arange(self._columns.start, self._columns.stop) // size
        elif not ((groups_I >= 0) & (groups_I < self._num_groups)).all():
            tensor = self._reader.describe(f"{self._layer}.{self._group_tensor}")
            raise InvalidCheckpoint(
                f"{tensor} gives inputs groups that aren't among the {self._num_groups} of the layer: it is damaged, "
                f"or group_size={size} in config.json is wrong"
            )
        if not len(groups_I):
            return slice(0, 0), groups_I
        first, last = int(groups_I.min()), int(groups_I.max())
        return slice(first, last + 1), groups_I - first

    def _given_groups(self) -> Tensor | None:
        """Return the groups that the checkpoint gives the inputs. None: neighboring inputs form a group."""
        name = f"{self._layer}.{self._group_tensor}"
        if not self._scheme.is_ordered and name not in self._reader:
            return None
        return self._view(self._group_tensor, (self._shape[1],), (self._columns,), *_INTEGERS).long()


class _CompressedTensors(_Part):
    """What the layouts of compressed-tensors share: scales are [O, G], and zero points are packed along the outputs."""

    _scale_tensor = "weight_scale"

    def _given_groups(self) -> Tensor | None:
        groups_I = super()._given_groups()
        # -1 is what the tool has there before it orders the inputs
        return None if groups_I is None or (groups_I == -1).any() else groups_I

    def _scales(self) -> Tensor:
        name = f"{self._layer}.{self._scale_tensor}"
        shape, num_rows = self._reader.shape(name), self._shape[0]
        if self._num_groups == 1 and shape in ((), (1,), (1, 1)):
            scale = self._reader.view(name, shape, (slice(None),) * len(shape))
            return scale.reshape(1, 1).expand(self._rows.stop - self._rows.start, 1)
        if self._num_groups == 1 and shape == (num_rows,):
            return self._reader.view(name, shape, (self._rows,)).unsqueeze(1)
        return self._view(self._scale_tensor, (num_rows, self._num_groups), (self._rows, self._groups), *READABLE)

    def _zeros(self) -> Tensor:
        if self._scheme.symmetric:
            return torch.full((1, 1), 1 << (self._bits - 1), dtype=torch.uint8)
        words, offset = self._words_of(self._rows)
        shape = (self._num_words(self._shape[0]), self._num_groups)
        words_VG = self._view("weight_zero_point", shape, (words, self._groups), torch.int32)
        zeros_GO = unpack(words_VG.t(), self._bits)
        return zeros_GO[:, offset : offset + self._rows.stop - self._rows.start].t()


class _Packed(_CompressedTensors):
    """weight_packed has the words [O, W] of unsigned integers."""

    def _words(self) -> tuple[Tensor, int]:
        self._check_shape()
        words, offset = self._words_of(self._columns)
        shape = (self._shape[0], self._num_words(self._shape[1]))
        return self._view("weight_packed", shape, (self._rows, words), torch.int32), offset

    def _check_shape(self) -> None:
        num_outputs, num_inputs = self._view("weight_shape", (2,), (slice(None),), *_INTEGERS)
        found = int(num_outputs), int(num_inputs)
        if found != self._shape:
            tensor = self._reader.describe(f"{self._layer}.weight_shape")
            raise InvalidCheckpoint(
                f"{tensor} says that the weight has shape {found}, but config.json implies {self._shape}: the weights "
                "and config.json are of different models"
            )


class _Fp4(_CompressedTensors):
    """weight_packed, or ModelOpt's weight, has bytes [O, I / 2]. weight_scale [O, G] is in fp8, or has exponents."""

    def _words(self) -> tuple[Tensor, int]:
        words, offset = self._words_of(self._columns)
        own = self._rows, slice(words.start * _WORD_BYTES, words.stop * _WORD_BYTES)
        tensor = "weight_packed" if f"{self._layer}.weight_packed" in self._reader else "weight"
        bytes_OB = self._view(tensor, (self._shape[0], -(-self._shape[1] // 2)), own, torch.uint8)
        # copied, because a file's bytes may lie where words can't
        return pad(bytes_OB, (0, -bytes_OB.shape[1] % _WORD_BYTES)).clone().view(torch.int32), offset

    def _scales(self) -> Tensor:
        shape, part = (self._shape[0], self._num_groups), (self._rows, self._groups)
        scales_OG = as_floats(self._view("weight_scale", shape, part, FP8, *EXPONENTS))
        for tensor, combine in (("weight_global_scale", torch.div), ("weight_scale_2", torch.mul)):
            name = f"{self._layer}.{tensor}"
            if name in self._reader:
                of_all = self._reader.view(name, self._reader.shape(name), (), (torch.float32,))
                if of_all.numel() != 1:
                    raise InvalidCheckpoint(
                        f"{self._reader.describe(name)} has {of_all.numel()} numbers: expected one scale"
                    )
                scales_OG = combine(scales_OG, of_all.reshape(()))
        return scales_OG * 0.5  # integers are twice the numbers

    def _zeros(self) -> Tensor:
        return E2M1_INTEGERS[:1].reshape(1, 1)


class _Int8(_CompressedTensors):
    """weight has the signed integers [O, I] themselves."""

    def _words(self) -> tuple[Tensor, int]:
        values_OI = self._view(self._scheme.numbers, self._shape, (self._rows, self._columns), torch.int8)
        # with the highest bit inverted, -128 to 127 are 0 to 255
        return pack(values_OI.contiguous().view(torch.uint8) ^ 128, 8), 0


class _TorchAOInt8(_Int8):
    """The same with other names, and zero points [O, G] of any layer."""

    _scale_tensor = "_weight_scale"

    def _zeros(self) -> Tensor:
        name = "_weight_zero_point"
        if f"{self._layer}.{name}" not in self._reader:
            return super()._zeros()
        shape = self._reader.shape(f"{self._layer}.{self._scale_tensor}")  # each scale has one
        is_one = len(shape) != 2 or shape[0] == 1
        part = (slice(None),) * len(shape) if is_one else (self._rows, self._groups)
        zeros = self._view(name, shape, part, torch.int8).view(torch.uint8) ^ 128
        return zeros.reshape(1, 1) if is_one else zeros


class _TorchAOInt4(_Part):
    """_weight_qdata has bytes [O, I / 2]. Scales and zero points are [G, O]: of the latter, those of the middle."""

    def _words(self) -> tuple[Tensor, int]:
        words, offset = self._words_of(self._columns)
        own = self._rows, slice(words.start * _WORD_BYTES, words.stop * _WORD_BYTES)
        bytes_OB = self._view(
            self._scheme.numbers, (self._shape[0], -(-self._shape[1] // 2)), own, torch.int8, torch.uint8
        )
        # with the highest bit of each integer inverted, -8 to 7 are 0 to 15
        return pack(bytes_OB.contiguous().view(torch.uint8) ^ 0x88, 8), offset

    def _scales(self) -> Tensor:
        return self._numbers("_weight_scale")

    def _zeros(self) -> Tensor:
        return self._numbers("_weight_zero_point") - 8 * self._numbers("_weight_scale")

    def _numbers(self, tensor: str) -> Tensor:
        part = self._groups, self._rows
        return self._view(tensor, (self._num_groups, self._shape[0]), part, *READABLE).t().float()


def _torchao(*arguments: Any) -> _Part:
    scheme: WeightScheme = arguments[2]
    return (_TorchAOInt4 if scheme.bits == 4 else _TorchAOInt8)(*arguments)


class _Transposed(_Part):
    """What GPTQ and AWQ share: tensors have a row for each input or group, and a column for each output."""

    _group_tensor = "g_idx"

    def _scales(self) -> Tensor:
        part = (self._groups, self._rows)
        return self._view("scales", (self._num_groups, self._shape[0]), part, *READABLE).t()

    def _unpack_outputs(self, tensor: str, num_rows: int, part: slice) -> Tensor:
        """Return a part of the rows of a tensor that is packed along the outputs, as uint8[part, O]."""
        words, offset = self._words_of(self._rows)
        words_NV = self._view(tensor, (num_rows, self._num_words(self._shape[0])), (part, words), torch.int32)
        integers_NO = self._in_order(unpack(words_NV, self._bits))
        return integers_NO[:, offset : offset + self._rows.stop - self._rows.start]

    def _in_order(self, integers_NO: Tensor) -> Tensor:
        """Return the integers of whole words in the order of the outputs."""
        return integers_NO

    def _zeros(self) -> Tensor:
        zeros_GO = self._unpack_outputs("qzeros", self._num_groups, self._groups)
        # A zero of 0 was stored as -1, all of whose bits are set.
        return ((zeros_GO + self._scheme.zero_offset) & ((1 << self._bits) - 1)).t()


class _Gptq(_Transposed):
    """qweight has the words [W, O]."""

    def _words(self) -> tuple[Tensor, int]:
        words, offset = self._words_of(self._columns)
        shape = (self._num_words(self._shape[1]), self._shape[0])
        return self._view("qweight", shape, (words, self._rows), torch.int32).t(), offset


class _Awq(_Transposed):
    """qweight has the words [I, V]."""

    def _words(self) -> tuple[Tensor, int]:
        return pack(self._unpack_outputs("qweight", self._shape[1], self._columns).t(), self._bits), 0

    def _in_order(self, integers_NO: Tensor) -> Tensor:
        words_NV8 = integers_NO.view(len(integers_NO), -1, len(_AWQ_ORDER))
        return words_NV8.index_select(2, torch.tensor(_AWQ_ORDER)).view(integers_NO.shape)


_LAYOUTS: dict[str, Callable[..., _Part]] = {
    "packed": _Packed,
    "fp4": _Fp4,
    "int8": _Int8,
    "gptq": _Gptq,
    "awq": _Awq,
    "torchao": _torchao,
}
