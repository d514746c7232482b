"""Results as JSON, base64 and bytes.

The numbers of a request can take longer to write than to compute. They are written from numpy's arrays, a result at a
time, so that the thread that does it lets others run in between.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from raycore.parts.pooling.server.protocol import EmbedDType, Endianness
from raycore.server.http.json_text import to_json

Floats = NDArray[np.float32]


def as_json(data: Floats) -> msgspec.Raw:
    """An array as nested lists. What isn't finite is null. The numbers are exact: each is its float32."""
    return msgspec.Raw(to_json(data.tolist()))


def as_base64(data: Floats, dtype: EmbedDType, endianness: Endianness) -> msgspec.Raw:
    """An array's bytes as text."""
    return msgspec.Raw(b'"' + b64encode(as_bytes(data, dtype, endianness)) + b'"')


def as_bytes(data: Floats, dtype: EmbedDType, endianness: Endianness) -> bytes:
    """An array's bytes, the last axis first. `native` is this machine's order."""
    stored: Any = _CONVERSIONS[dtype](np.ascontiguousarray(data, np.float32))
    is_swapped = endianness not in ("native", sys.byteorder)
    return (stored.byteswap() if is_swapped else stored).tobytes()


def packed_bits(data: Floats, *, is_signed: bool) -> list[int]:
    """One bit for each element, 1 for those that aren't negative, eight to a number, the first one on top.

    `is_signed`: numbers from -128 to 127 instead of from 0 to 255, each 128 less.
    """
    packed = np.packbits(data >= 0).astype(np.int16)
    return (packed - 128 if is_signed else packed).tolist()


def _float16(data: Floats) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return data.astype(np.float16)


def _bfloat16(data: Floats) -> NDArray[Any]:
    given: Any = data
    bits: NDArray[np.uint32] = given.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # rounding could carry the bits of a nan over to those of an infinity
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


@cache
def _values_of_float8(num_exponent_bits: int, num_mantissa_bits: int) -> NDArray[np.float64]:
    """The values of the codes 0 to 127 of a float with 8 bits, as if none of them stood for infinity or nan."""
    codes = np.arange(128)
    exponents, mantissas = codes >> num_mantissa_bits, codes & ((1 << num_mantissa_bits) - 1)
    is_normal = exponents > 0
    scale = 2.0 ** (np.maximum(exponents, 1) - (1 << (num_exponent_bits - 1)) + 1)
    return scale * (is_normal + mantissas / (1 << num_mantissa_bits))


def _float8(data: Floats, num_exponent_bits: int, num_mantissa_bits: int, overflow: int) -> NDArray[Any]:
    """Round to the nearest value, and to the even code between two. `overflow`: the code of what is too large."""
    values = _values_of_float8(num_exponent_bits, num_mantissa_bits)[: overflow + 1]
    sizes = np.abs(data.astype(np.float64))
    middles = (values[1:] + values[:-1]) / 2
    codes = np.searchsorted(middles, sizes, side="left")
    is_tie = (codes < len(middles)) & (middles[np.minimum(codes, len(middles) - 1)] == sizes)
    codes = codes + (is_tie & (codes % 2 == 1))
    codes = np.where(np.isnan(data), 0x7F, codes) | (np.signbit(data).astype(np.int64) << 7)
    return codes.astype(np.uint8)


def _float32(data: Floats) -> NDArray[Any]:
    return data


_CONVERSIONS: dict[EmbedDType, Callable[[Floats], NDArray[Any]]] = {
    "float32": _float32,
    "float16": _float16,
    "bfloat16": _bfloat16,
    "fp8_e4m3": partial(_float8, num_exponent_bits=4, num_mantissa_bits=3, overflow=0x7E),
    "fp8_e5m2": partial(_float8, num_exponent_bits=5, num_mantissa_bits=2, overflow=0x7C),
}


def metadata(results: Sequence[Floats], dtype: EmbedDType, endianness: Endianness) -> list[dict[str, Any]]:
    """Where each result is in the bytes of all, one after the other."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    entries: list[dict[str, Any]] = []
    start = 0
    for index, data in enumerate(results):
        end = start + data.size * size
        entries.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": endianness,
                "start": start,
                "end": end,
                "shape": list(data.shape),
            }
        )
        start = end
    return entries
