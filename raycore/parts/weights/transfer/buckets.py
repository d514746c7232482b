"""Packs tensors into buffers of bytes, and reads them there without a copy."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from raycore.errors import InvalidInput

BUCKET_BYTES = 32 << 20
"""So that several fit into the store of a local Ray, which has 256 MiB."""
PACKED_BYTES = 1 << 30
"""The buckets of broadcasts of which one call announces several, as vLLM's trainers make them."""
_ALIGNMENT = 64
_LAYER = re.compile(r".*?\.\d+\.")

Allocate = Callable[[int], Tensor]
"""Returns a buffer of so many bytes, uint8."""


class Entry(NamedTuple):
    """Where a tensor is in a buffer."""

    name: str
    dtype: str
    """As torch names it, such as `bfloat16`."""
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def dtype_of(name: object) -> torch.dtype:
    """Return torch's data type of this name. Raises InvalidInput if there is none."""
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise InvalidInput(f"{name!r} isn't the name of one of torch's data types, such as 'bfloat16'")
    return found


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
    """Return where tensors are if they are packed into one buffer, in this order."""
    entries: list[Entry] = []
    start = 0
    for name, tensor in tensors:
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
        start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return entries


def size_of(layout: Sequence[Entry]) -> int:
    """Return the size of a buffer in bytes."""
    return max((entry.start + -(-entry.num_bytes // _ALIGNMENT) * _ALIGNMENT for entry in layout), default=0)


def divided(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield neighboring tensors that fit into a bucket together. A larger tensor comes alone.

    A layer that fits into a bucket isn't divided: what workers get of a layer before the rest, they have to copy.
    """
    waiting: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        while waiting and num_bytes + tensor.nbytes > bucket_bytes:
            count = _num_before(waiting, _layer_of(name)) or len(waiting)
            yield waiting[:count]
            waiting = waiting[count:]
            num_bytes = sum(each.nbytes for _, each in waiting)
        waiting.append((name, tensor))
        num_bytes += tensor.nbytes
    if waiting:
        yield waiting


def _num_before(tensors: Sequence[tuple[str, Tensor]], layer: str | None) -> int:
    """Return how many tensors come before those at the end that are of a layer."""
    count = len(tensors)
    while count and layer is not None and _layer_of(tensors[count - 1][0]) == layer:
        count -= 1
    return count


def _layer_of(name: str) -> str | None:
    """Return a tensor's name up to the first number in it. None: it isn't in a layer."""
    found = _LAYER.match(name)
    return None if found is None else found[0]


def pack(tensors: Sequence[tuple[str, Tensor]], allocate: Allocate) -> tuple[list[Entry], Tensor]:
    """Copy tensors into one buffer. Returns where each is, and the buffer."""
    layout = layout_of(tensors)
    buffer = allocate(size_of(layout))
    for entry, (_, into), (_, tensor) in zip(layout, unpack(layout, buffer), tensors, strict=True):
        assert into.shape == entry.shape
        into.copy_(tensor.detach())
    return layout, buffer


def unpack(layout: Sequence[Entry], buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors in a buffer. They share its memory."""
    return [
        (entry.name, buffer[entry.start : entry.start + entry.num_bytes].view(dtype_of(entry.dtype)).view(entry.shape))
        for entry in layout
    ]


def checked_layout(value: object, num_bytes: int) -> list[Entry]:
    """Return a layout that another program has sent. Raises InvalidInput if it doesn't fit a buffer of this size."""
    layout: list[Entry] = []
    entries: list[Any] = list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else [value]
    for each in entries:
        try:
            name, dtype, shape, start = each
            entry = Entry(str(name), str(dtype), tuple(map(int, shape)), int(start))
        except (TypeError, ValueError):
            raise InvalidInput(f"a tensor's entry is {each!r}: expected (name, dtype, shape, start)") from None
        if entry.start < 0 or min(entry.shape, default=0) < 0 or entry.start + entry.num_bytes > num_bytes:
            raise InvalidInput(f"tensor {entry.name!r} isn't in its buffer of {num_bytes} bytes: {entry}")
        if entry.start % dtype_of(entry.dtype).itemsize:
            raise InvalidInput(f"tensor {entry.name!r} begins at byte {entry.start}, inside of an item")
        layout.append(entry)
    return layout


def pack_object(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return an object for Ray's store, which copies the tensors once: when the object is put there."""
    own = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]
    return {
        "layout": [tuple(layout_of([pair])[0]) for pair in own],
        "arrays": [tensor.view(-1).view(torch.uint8).numpy() for _, tensor in own],
    }


def unpack_object(bucket: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors in an object that `pack_object` has made. Nobody may write to them.

    Raises InvalidInput if a tensor doesn't fit its array.
    """
    memories = [as_tensor(array) for array in bucket["arrays"]]
    if len(memories) != len(bucket["layout"]):
        raise InvalidInput(f"a bucket has {len(bucket['layout'])} entries for {len(memories)} arrays")
    return [
        pair
        for entry, memory in zip(bucket["layout"], memories, strict=True)
        for pair in unpack(checked_layout([entry], len(memory)), memory)
    ]


def as_tensor(memory: Any) -> Tensor:
    """Return the bytes of a buffer, which may be read-only, as uint8. Nobody may write to the tensor."""
    if not memoryview(memory).nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(memory, dtype=torch.uint8)
