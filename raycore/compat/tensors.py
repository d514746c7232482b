"""Tensors as clients send and get them: in base64, and as the bytes of a server's answers."""

from __future__ import annotations

import base64
import io
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from raycore.errors import InvalidRequest

Endianness = Literal["native", "big", "little"]
ENDIANNESS = ("native", "big", "little")
EMBED_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The data types that `embed_dtype` names."""


@dataclass
class MetadataItem:
    """Where one result is in the bytes of an answer, and how it is written there."""

    index: int
    embed_dtype: str
    endianness: Endianness
    start: int
    end: int
    shape: tuple[int, ...]


def tensor2base64(x: torch.Tensor) -> str:
    """A tensor as torch saves it, in base64."""
    file = io.BytesIO()
    torch.save(x, file)
    return base64.b64encode(file.getvalue()).decode()


def tensor2binary(tensor: torch.Tensor, embed_dtype: str, endianness: Endianness) -> bytes:
    """The elements of a tensor in a data type and an order of bytes."""
    data = tensor.detach().to(_dtype(embed_dtype)).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return _ordered(data, embed_dtype, endianness)


def binary2tensor(binary: bytes, shape: Sequence[int], embed_dtype: str, endianness: Endianness) -> torch.Tensor:
    """The tensor that `tensor2binary` wrote."""
    data = bytearray(_ordered(binary, embed_dtype, endianness))
    return torch.frombuffer(data, dtype=torch.uint8).view(_dtype(embed_dtype)).reshape(tuple(shape))


def build_metadata_items(
    embed_dtype: str, endianness: Endianness, shape: Sequence[int], n_request: int
) -> list[MetadataItem]:
    """What the header `metadata` would say of so many results of one shape, one after the other."""
    size = math.prod(shape) * _dtype(embed_dtype).itemsize
    return [
        MetadataItem(index, embed_dtype, endianness, index * size, (index + 1) * size, tuple(shape))
        for index in range(n_request)
    ]


def decode_pooling_output(items: Iterable[MetadataItem], body: bytes) -> list[torch.Tensor]:
    """The results in an answer's body, in the order of their indices."""
    return [
        binary2tensor(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]


def _dtype(name: str) -> torch.dtype:
    if name not in EMBED_DTYPES:
        raise InvalidRequest(f"embed_dtype={name!r} isn't one of {', '.join(EMBED_DTYPES)}")
    return EMBED_DTYPES[name]


def _ordered(data: bytes, embed_dtype: str, endianness: Endianness) -> bytes:
    """Turn the elements' bytes around unless this machine has them in that order. The inverse of itself."""
    if endianness not in ENDIANNESS:
        raise InvalidRequest(f"endianness={endianness!r} isn't one of {', '.join(ENDIANNESS)}")
    if endianness in ("native", sys.byteorder):
        return data
    elements = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, _dtype(embed_dtype).itemsize)
    return elements.flip(1).contiguous().numpy().tobytes()
