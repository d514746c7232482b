"""Reads parts of tensors from GGUF files. Only the rows and blocks that a part needs are read.

The package `gguf` makes numbers of quantized tensors, in float32. Shape suffixes: O outputs, I inputs, B bytes of an
output.
"""

from __future__ import annotations

# numpy and torch are partially typed for each other:
# pyright: reportUnknownMemberType=false
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycore.checkpoint.gguf.header import BLOCKS
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.errors import InvalidCheckpoint
from raycore.extras import needing
from raycore.models.quantization import GGUF_SCHEMES, WeightScheme
from raycore.weights.packed_weight import PackedWeight, pack

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
_Integers = tuple[Any, Any, Any]
"""Codes, uint8, scales, float32, and offsets, float32, or None. numpy's operators lose these types."""


class GgufMapping:
    """The bytes of a file, which are read when they are used."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # torch warns of memory that can't be written to; what would be written isn't written to the file
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._path = path
        self._bytes: _Bytes = np.frombuffer(data, np.uint8)

    def slice(self, tensor: StoredTensor) -> GgufSlice:
        """Return a tensor of the file. Raises InvalidCheckpoint if the file has become shorter."""
        if tensor.end > len(self._bytes):
            raise InvalidCheckpoint(
                f"{self._path} has {len(self._bytes):,} bytes, and a tensor that ends at byte {tensor.end:,}: it has "
                "changed since its header was read"
            )
        return GgufSlice(tensor, self._bytes[tensor.start : tensor.end])


class GgufSlice:
    """A tensor of one, two or three dimensions, with the methods of safetensors' slices. Its rows are in the order of a
    Hugging Face checkpoint."""

    def __init__(self, tensor: StoredTensor, data: _Bytes) -> None:
        self._tensor = tensor
        self._num_numbers, self._num_bytes = BLOCKS[tensor.dtype]
        self._bytes_OB: _Bytes = np.reshape(data, (-1, tensor.shape[-1] // self._num_numbers * self._num_bytes))

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: Any) -> Tensor:
        """Return the numbers of a part: in float32 if they are quantized or have been changed, else as stored."""
        if len(self._tensor.shape) == 3 or isinstance(part[0], int):
            return self._numbers(self._bytes_OB).view(self._tensor.shape)[part]  # few numbers
        if len(self._tensor.shape) == 1:
            numbers_I = self._numbers(self._bytes_OB).view(-1)
            return numbers_I[self._stored_rows(part[0])]
        outputs, inputs = (*part, slice(None))[:2]
        start, end, _ = inputs.indices(self._tensor.shape[1])
        bytes_OB, offset = self.blocks(outputs, start, end)
        return self._numbers(bytes_OB)[:, offset : offset + end - start]

    def blocks(self, outputs: slice, start: int, end: int) -> tuple[_Bytes, int]:
        """Return the blocks that have the inputs from `start` to `end` of some outputs, and how many inputs of the
        first block come before these."""
        first, last = start // self._num_numbers, -(-end // self._num_numbers)
        columns = slice(first * self._num_bytes, last * self._num_bytes)
        return self._bytes_OB[self._stored_rows(outputs), columns], start - first * self._num_numbers

    def packed(self, outputs: slice, inputs: slice) -> PackedWeight:
        """Return a part of a weight of one of the types of `GGUF_SCHEMES` in integers."""
        start, end, _ = inputs.indices(self._tensor.shape[1])
        bytes_OB, offset = self.blocks(outputs, start, end)
        blocks_OnB = bytes_OB.reshape(len(bytes_OB), -1, self._num_bytes)
        with np.errstate(all="ignore"):  # see _numbers
            codes_OnI, scales_OG, offsets_OG = _INTEGERS[self._tensor.dtype](blocks_OnB)
        codes_OI = codes_OnI.reshape(len(bytes_OB), -1)[:, offset : offset + end - start]
        scheme = GGUF_SCHEMES[self._tensor.dtype]
        zeros_OG = torch.full((1, 1), 1 << (scheme.bits - 1), dtype=torch.uint8)
        if offsets_OG is not None:
            zeros_OG = torch.from_numpy(offsets_OG)
        groups_I = torch.arange(offset, offset + end - start) // (scheme.group_size or 1)
        words_OW = pack(torch.from_numpy(np.array(codes_OI)), scheme.bits)
        groups = torch.from_numpy(scales_OG), zeros_OG, groups_I
        return PackedWeight(words_OW, scheme.bits, 0, end - start, *groups, scheme.code)

    def _stored_rows(self, rows: slice) -> slice | Any:
        """Return where the file has these rows."""
        heads, num_rows = self._tensor.alternating_heads, self._tensor.shape[0]
        if not heads:
            return rows
        asked, half = np.arange(*rows.indices(num_rows)), num_rows // heads // 2
        head, in_head = np.divmod(asked, 2 * half)
        of_half, in_half = np.divmod(in_head, half)
        return head * 2 * half + in_half * 2 + of_half

    def _numbers(self, bytes_OB: _Bytes) -> Tensor:
        name, added = self._tensor.dtype, self._tensor.added
        if name in _DTYPES:
            dtype = _DTYPES[name]
            bytes_OB = np.require(bytes_OB, requirements="C")
            if bytes_OB.ctypes.data % dtype.itemsize:
                bytes_OB = np.array(bytes_OB)
            numbers_OI = torch.from_numpy(bytes_OB).view(dtype)
        else:
            # imported lazily: files without quantized tensors don't need it
            with needing("GGUF's quantized tensors need", "gguf"):
                from gguf import GGMLQuantizationType, quants

            with np.errstate(all="ignore"):  # numpy would warn of scales that aren't finite, as torch doesn't
                numbers_OI = torch.from_numpy(quants.dequantize(bytes_OB, GGMLQuantizationType[name]))
        return numbers_OI.float() - added if added else numbers_OI


def types_by_row_bytes(scheme: WeightScheme, num_inputs: int) -> dict[int, str]:
    """Return the types that are kept by a scheme, by the bytes of a row of so many inputs. No two have the same."""
    return {
        num_inputs // numbers * num_bytes: name
        for name, (numbers, num_bytes) in BLOCKS.items()
        if GGUF_SCHEMES.get(name) == scheme and num_inputs % numbers == 0
    }


def given_blocks(blocks_OB: Tensor, scheme: WeightScheme, num_inputs: int) -> GgufSlice:
    """Return the tensor whose blocks, uint8[O, B], are those of one of `types_by_row_bytes`. Its rows are in the order
    of a Hugging Face checkpoint."""
    num_outputs, row_bytes = blocks_OB.shape
    name = types_by_row_bytes(scheme, num_inputs)[row_bytes]
    tensor = StoredTensor(Path(), name, (num_outputs, num_inputs), 0, blocks_OB.numel())
    return GgufSlice(tensor, blocks_OB.cpu().contiguous().numpy())


def _scales(blocks_OnB: _Bytes, at: int) -> _Floats:
    """Return the numbers in float16 at a place in each block, [O, n]."""
    return np.array(blocks_OnB[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _halves(bytes_OnB: _Bytes) -> Any:
    """Return integers of 4 bits: first those in the lower halves of bytes, and then those in the upper ones."""
    return np.concatenate((bytes_OnB & 15, bytes_OnB >> 4), axis=-1)


def _q8_0(blocks_OnB: _Bytes) -> _Integers:
    return blocks_OnB[..., 2:] ^ 128, _scales(blocks_OnB, 0), None


def _q4_0(blocks_OnB: _Bytes) -> _Integers:
    return _halves(blocks_OnB[..., 2:]), _scales(blocks_OnB, 0), None


def _q4_1(blocks_OnB: _Bytes) -> _Integers:
    return _halves(blocks_OnB[..., 4:]), _scales(blocks_OnB, 0), _scales(blocks_OnB, 2)


def _q5_0(blocks_OnB: _Bytes) -> _Integers:
    return _with_fifth_bits(blocks_OnB[..., 2:]) + 112, _scales(blocks_OnB, 0), None


def _q5_1(blocks_OnB: _Bytes) -> _Integers:
    return _with_fifth_bits(blocks_OnB[..., 4:]), _scales(blocks_OnB, 0), _scales(blocks_OnB, 2)


def _with_fifth_bits(bytes_OnB: _Bytes) -> Any:
    """Return 32 integers of 5 bits: their upper bits are in 4 bytes, and the others follow."""
    fifth = np.unpackbits(bytes_OnB[..., :4], axis=-1, bitorder="little")
    return _halves(bytes_OnB[..., 4:]) | fifth << 4


def _q4_k(blocks_OnB: _Bytes) -> _Integers:
    return _four_times_64(blocks_OnB[..., 16:]), *_scales_and_offsets(blocks_OnB)


def _q5_k(blocks_OnB: _Bytes) -> _Integers:
    """Each of 32 bytes has the fifth bits of eight integers, one from each 32."""
    bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth: Any = blocks_OnB[..., None, 16:48] >> bits & 1
    codes = _four_times_64(blocks_OnB[..., 48:])
    return codes | fifth.reshape(codes.shape) << 4, *_scales_and_offsets(blocks_OnB)


def _four_times_64(bytes_OnB: _Bytes) -> Any:
    """Return 256 integers of 4 bits, of which 32 bytes each have 64."""
    shape = bytes_OnB.shape[:-1]
    return _halves(bytes_OnB.reshape(*shape, 4, 32)).reshape(*shape, 256)


def _scales_and_offsets(blocks_OnB: _Bytes) -> tuple[Any, Any]:
    """Return those of each 32 of 256 integers, [O, 8n]: products of the block's and of integers of 6 bits. Of these,
    the first four of both kinds are in the lower bits of 8 bytes. The others have their lower 4 bits in 4 further
    bytes, and their upper 2 bits are the upper bits of the first 8."""
    first, second, last = np.split(blocks_OnB[..., 4:16], 3, axis=-1)
    scales = np.concatenate((first & 63, last & 15 | first >> 6 << 4), axis=-1)
    offsets = np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=-1)
    num_outputs = len(blocks_OnB)
    return (
        (_scales(blocks_OnB, 0)[..., None] * scales).reshape(num_outputs, -1),
        (-_scales(blocks_OnB, 2)[..., None] * offsets).reshape(num_outputs, -1),
    )


def _q6_k(blocks_OnB: _Bytes) -> _Integers:
    """Each half of a block has four times 32 integers: their lower 4 bits in 64 bytes, their upper 2 bits in 32."""
    shape = blocks_OnB.shape[:-1]
    lower = blocks_OnB[..., :128].reshape(*shape, 2, 64)
    upper = blocks_OnB[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    codes = _halves(lower) | (upper & 3).reshape(*shape, 2, 128) << 4
    parts = blocks_OnB[..., 192:208].view(np.int8).astype(np.float32)
    return codes + 96, (parts * _scales(blocks_OnB, 208)[..., None]).reshape(shape[0], -1), None


_INTEGERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""By type: from blocks [O, n, B], the unsigned integers [O, n, I], and the scales and offsets [O, G], in the terms of
`IntegerWeight`. Without offsets, the middle of 4 or 8 bits stands for zero."""
