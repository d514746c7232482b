"""Fills a rank's weights with numbers: from a checkpoint's files, or random ones.

Each fill writes one part of one tensor to its place in the rank's weights, on any device, and converts the numbers to
the dtype of that place.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from raycore.errors import InvalidCheckpoint
from raycore.models.quantization import Quantization, WeightScheme, stored_scheme
from raycore.parts.experts.models import MXFP4_NUMBERS
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.weights.fp8_blocks import Fp8Blocks, read_fp8_blocks
from raycore.weights.fp8_weight import FP8, Fp8Weight
from raycore.weights.gathered import GatheredRows
from raycore.weights.gguf_slice import GgufSlice
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight, kept_group_size
from raycore.weights.mxfp4 import read_mxfp4
from raycore.weights.packed_weight import NUMBERS_AT_A_TIME, PackedWeight
from raycore.weights.quantized import read_packed
from raycore.weights.staging import Staging
from raycore.weights.weight import Part, Weight

_DUMMY_STDDEV = 0.02
_NORM = re.compile(r"norm(s\.\d+)?\.weight$")


class CheckpointFill:
    """Fills weights from a checkpoint's files. May be called by several threads.

    Quantized weights become numbers while they are read, except for those whose place has the same format.
    """

    def __init__(self, reader: CheckpointReader, staging: Staging | None, quantization: Quantization | None) -> None:
        """Make a fill.

        Args:
            staging: brings tensors to the weights' device. None: the device is the CPU.
            quantization: which weights are stored in which scheme. None: none are quantized.
        """
        self._reader = reader
        self._staging = staging
        self._quantization = quantization

    def __call__(self, out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
        if isinstance(out, GatheredRows):
            out.fill_rows(self._reader.view(name, expected_shape, part))
            return
        if name + MXFP4_NUMBERS in self._reader:
            weight = self._mxfp4(name, expected_shape, part)
            if isinstance(out, IntegerWeight):
                out.fill_(weight)
            else:
                self._convert(out, weight)
            return
        scheme = stored_scheme(self._quantization, self._reader.__contains__, name)
        stored_gguf = self._reader.gguf(name)
        if stored_gguf is not None:
            self._from_gguf(out, stored_gguf, name, scheme, expected_shape, part)
            return
        if scheme is None or scheme.layout == "gguf":
            self._store(out, self._reader.view(name, expected_shape, part), None)
        elif scheme.format == "integers":
            self._dequantize(out, name, scheme, expected_shape, part)
        else:
            self._from_fp8(out, name, scheme, expected_shape, part)

    def _from_fp8(
        self, out: Weight, name: str, scheme: WeightScheme, expected_shape: tuple[int, ...], part: Part
    ) -> None:
        inputs = part[-1] if len(part) == len(expected_shape) else slice(None)
        assert isinstance(inputs, slice)
        keeps = _keeps(out, scheme, inputs, expected_shape[-1])
        if scheme.format == "fp8_blocks":
            blocks = read_fp8_blocks(self._reader, name, scheme, expected_shape, part)
            if not keeps:
                self._convert(out, blocks)
                return
        else:
            stored = self._reader.view(scheme.tensor(name, scheme.numbers), expected_shape, part, (FP8,))
            scales_O = self._scales(name, scheme, expected_shape[0], part[0]).expand(len(stored))
            if not keeps:
                self._store(out, stored, scales_O)
                return
            of_rows = torch.arange(len(stored)), torch.zeros(stored.shape[1], dtype=torch.int64)
            blocks = Fp8Blocks(stored, scales_O.unsqueeze(1), *of_rows)
        assert isinstance(out, IntegerWeight)
        out.fill_(blocks.packed())

    def _dequantize(
        self, out: Weight, name: str, scheme: WeightScheme, expected_shape: tuple[int, ...], part: Part
    ) -> None:
        num_outputs, num_inputs = expected_shape
        outputs, inputs = (*part, slice(None))[:2]
        assert isinstance(outputs, slice)
        assert isinstance(inputs, slice)
        weight = read_packed(self._reader, name, scheme, (num_outputs, num_inputs), outputs, inputs)
        if _keeps(out, scheme, inputs, num_inputs):
            out.fill_(weight)
        else:
            self._convert(out, weight)

    def _from_gguf(
        self,
        out: Weight,
        stored: GgufSlice,
        name: str,
        scheme: WeightScheme | None,
        expected_shape: tuple[int, ...],
        part: Part,
    ) -> None:
        outputs, inputs = (*part, slice(None))[:2]
        if not isinstance(outputs, slice) or not isinstance(inputs, slice):
            self._store(out, self._reader.view(name, expected_shape, part), None)
        elif scheme is not None and _keeps(out, scheme, inputs, expected_shape[1]):
            for own, rows in _blocks(outputs, expected_shape):
                out[own].fill_(stored.packed(rows, inputs))
        else:
            self._store_in_blocks(out, name, expected_shape, part)

    def _store_in_blocks(self, out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
        """Store a part some rows at a time, because views of the tensor are copies."""
        outputs, *others = part
        assert isinstance(outputs, slice)
        for own, rows in _blocks(outputs, expected_shape):
            self._store(out[own], self._reader.view(name, expected_shape, (rows, *others)), None)

    def _mxfp4(self, name: str, expected_shape: tuple[int, ...], part: Part) -> PackedWeight:
        num_experts, num_outputs, num_inputs = expected_shape
        expert, outputs, inputs = part
        assert isinstance(expert, int)
        assert isinstance(outputs, slice)
        assert isinstance(inputs, slice)
        return read_mxfp4(self._reader, name, (num_experts, num_outputs, num_inputs), expert, outputs, inputs)

    def _convert(self, out: Weight, weight: PackedWeight | Fp8Blocks) -> None:
        dtype = out.dtype if isinstance(out, Tensor) else torch.float32
        for rows, numbers in weight.dequantized_blocks(dtype):
            self._store(out[rows], numbers, None)

    def _store(self, out: Weight, numbers: Tensor, scales_R: Tensor | None) -> None:
        def store_rows(rows: slice, numbers: Tensor) -> None:
            store(out[rows], numbers, None if scales_R is None else scales_R[rows])

        if self._staging is None:
            store_rows(slice(None), numbers)
        else:
            self._staging.send(numbers, store_rows)

    def _scales(self, name: str, scheme: WeightScheme, num: int, own: int | slice) -> Tensor:
        """Return the float32 scales of some of the `num` rows of the quantized tensor `name`, or that of one of its
        `num` experts."""
        name = scheme.tensor(name, scheme.scales)
        shape = self._reader.shape(name)
        if math.prod(shape) not in (1, num):
            raise InvalidCheckpoint(
                f"tensor {name} has shape {shape}: expected one scale, or one for each of the {num} "
                f"{'experts' if isinstance(own, int) else 'rows of the weight'}. config.json has no sizes of blocks "
                "that share a scale"
            )
        scales = self._reader.view(name, shape, (slice(None),) * len(shape))
        return scales.float().reshape(-1).expand(num)[own]


def _blocks(outputs: slice, shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield some rows of a tensor at a time: where they are among `outputs`, and where in the tensor."""
    start, end, _ = outputs.indices(shape[0])
    step = max(1, NUMBERS_AT_A_TIME // math.prod(shape[1:]))
    for first in range(start, end, step):
        last = min(first + step, end)
        yield slice(first - start, last - start), slice(first, last)


def _keeps(out: Weight, scheme: WeightScheme, inputs: slice, num_inputs: int) -> TypeGuard[IntegerWeight]:
    """Whether the place `out` takes a part of a weight that is stored like this as it is."""
    if not isinstance(out, IntegerWeight) or (out.bits, out.code) != (scheme.bits, scheme.kept_code):
        return False
    first_input, _, _ = inputs.indices(num_inputs)
    return out.group_size == kept_group_size(scheme, out.shape[1], first_input)


class RandomFill:
    """Fills weights with random numbers, and those of norms with ones.

    A tensor is a function of the seed, its name, and whether it is made on a CPU or on a GPU. A CPU would take minutes
    for a GPU's weights.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, out: Weight, name: str, expected_shape: tuple[int, ...], part: Part) -> None:
        if isinstance(out, Tensor) and _NORM.search(name.lower()):
            out.fill_(1.0)
            return
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        bound = _DUMMY_STDDEV * 3**0.5
        whole = torch.empty(expected_shape, device=out.device).uniform_(-bound, bound, generator=generator)
        store(out, whole[part], None)


def store(out: Weight, numbers: Tensor, scales_R: Tensor | None) -> None:
    """Set `out` to `numbers`, or to `numbers · scales_R`, waiting for a GPU only where there are scales.

    `numbers` are on `out`'s device or in pinned memory.
    """
    assert not isinstance(out, IntegerParts), "each part is set by itself"
    if isinstance(out, IntegerWeight):
        out.quantize_(numbers if scales_R is None else numbers.float() * scales_R.unsqueeze(1))
        return
    if numbers.dtype != (FP8 if isinstance(out, Fp8Weight) else out.dtype):
        # the device converts faster than the host, and without memory of the host
        numbers = numbers.to(out.device, non_blocking=True)
    if isinstance(out, Tensor):
        out.copy_(numbers, non_blocking=True)
        if scales_R is not None:
            out.mul_(scales_R.unsqueeze(1).to(out.device))
    elif scales_R is None:
        out.quantize_(numbers)
    else:
        out.values_OI.copy_(numbers, non_blocking=True)
        out.scales_O.copy_(scales_R)
