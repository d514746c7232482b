"""How workers get a trainer's tensors: `weight_transfer_config` names one of these ways.

Each way turns what `update_weights` gets into tensors with the names and the whole shapes that checkpoints have.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from raycore.errors import InvalidInput
from raycore.parts.weights.config import WeightTransferConfig
from raycore.parts.weights.transfer.buckets import (
    PACKED_BYTES,
    as_tensor,
    checked_layout,
    divided,
    dtype_of,
    layout_of,
    size_of,
    unpack,
    unpack_object,
)
from raycore.parts.weights.transfer.cuda_handles import handles_in, opened, parts_of
from raycore.system import os
from raycore.weights.checkpoint_reader import ANY_DTYPE, CheckpointReader

Load = Callable[[Sequence[tuple[str, Tensor]]], object]
Check = Callable[[Sequence[tuple[str, tuple[int, ...]]]], None]
_SEGMENT = re.compile(r"[A-Za-z0-9_.-]+")
_SHARED_MEMORY = Path("/dev/shm")


class Way(Protocol):
    """One worker's end of a way."""

    def connect(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer, if the way needs that."""
        ...

    def receive(self, update_info: dict[str, Any], load: Load, check: Check) -> None:
        """Get the tensors of one call.

        Args:
            load: takes them. Their memory may change once it has returned.
            check: raises InvalidInput if the model has no tensors with these names and shapes. Called before `load`.
        """
        ...

    def end_update(self) -> None:
        """Give up what is only needed between the calls of an update."""
        ...

    def disconnect(self) -> None:
        """Leave the trainer."""
        ...


def make_way(config: WeightTransferConfig, rank: int, device: torch.device) -> Way:
    """Return the way that the option names. `rank`: the worker's number among those of all data-parallel ranks."""
    if config.backend == "nccl":
        return Distributed(rank, device, config.timeout_s)
    if config.backend == "ipc":
        return SameNode(device, config.timeout_s)
    return {"ray": RayObjects, "disk": Files}[config.backend](config.timeout_s)


class _Unconnected:
    """What ways share that need no connection."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def connect(self, init_info: dict[str, Any]) -> None:
        """Do nothing."""

    def end_update(self) -> None:
        """Do nothing."""

    def disconnect(self) -> None:
        """Do nothing."""


class RayObjects(_Unconnected):
    """Objects in Ray's store, each a bucket, or a list or dict of tensors. They are read where they are."""

    def receive(self, update_info: dict[str, Any], load: Load, check: Check) -> None:
        from raycore.parts.weights.transfer.references import fetch  # imported lazily: imports Ray

        refs = _given(update_info, "refs", list)
        buckets = [_tensors_of(fetch(ref, self._timeout_s)) for ref in refs]
        pairs = [pair for bucket in buckets for pair in bucket]
        check([(name, tuple(tensor.shape)) for name, tensor in pairs])
        load(pairs)


class SameNode(_Unconnected):
    """Memory of a trainer on the worker's node: segments of POSIX shared memory, which the trainer makes and removes,
    or memory of the worker's own GPU, by CUDA's IPC handles."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._device = device
        self._mapped: dict[str, tuple[tuple[int, int], mmap.mmap]] = {}
        """By name: a segment's inode and size, and its memory. Kept during an update, because reading new mappings is
        slow."""

    def receive(self, update_info: dict[str, Any], load: Load, check: Check) -> None:
        if "ipc_handles" in update_info or "ipc_handles_pickled" in update_info:
            self._receive_from_gpu(update_info, load, check)
            return
        for name in [name for name in self._mapped if not (_SHARED_MEMORY / name).exists()]:
            del self._mapped[name]  # or its memory would stay
        pairs: list[tuple[str, Tensor]] = []
        for segment in _given(update_info, "segments", list):
            name = _given(segment, "name", str)
            memory = as_tensor(self._memory(name))
            layout = checked_layout(_given(segment, "layout", list), len(memory))
            pairs += unpack(layout, memory)
        check([(name, tuple(tensor.shape)) for name, tensor in pairs])
        load(pairs)

    def end_update(self) -> None:
        self._mapped.clear()

    def _receive_from_gpu(self, update_info: dict[str, Any], load: Load, check: Check) -> None:
        if self._device.type != "cuda":
            raise InvalidInput(
                f"update_info has ipc_handles of a GPU's memory, but this worker computes on {self._device}: "
                "give segments of shared memory (see docs/weight-updates.md)"
            )
        likes = _announced(update_info, check)
        handles = handles_in(update_info)
        if isinstance(handles, dict):
            sizes = _given(update_info, "tensor_sizes", list)
            load(parts_of(opened("the buffer", handles, self._device), likes, sizes))
        else:
            if len(handles) != len(likes):
                raise InvalidInput(f"update_info has {len(handles)} ipc_handles for {len(likes)} names")
            pairs = [
                (name, opened(f"tensor {name!r}", each, self._device))
                for (name, _), each in zip(likes, handles, strict=True)
            ]
            for (name, tensor), (_, like) in zip(pairs, likes, strict=True):
                if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                    raise InvalidInput(
                        f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} at its handle, "
                        f"but update_info says {like.dtype} {list(like.shape)}"
                    )
            load(pairs)
        # the trainer may change its memory as soon as the call returns
        torch.cuda.current_stream(self._device).synchronize()

    def _memory(self, name: str) -> mmap.mmap:
        path = _SHARED_MEMORY / name
        if not _SEGMENT.fullmatch(name):
            raise InvalidInput(f"segments: {name!r} isn't the name of a segment of shared memory")
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                key = status.st_ino, status.st_size
                if self._mapped.get(name, (None,))[0] != key:
                    self._mapped[name] = key, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"the segment {name!r} of shared memory can't be read on this node: {error}") from None
        return self._mapped[name][1]


class Files(_Unconnected):
    """A directory with tensors in safetensors files, as checkpoints have them, all or some."""

    def receive(self, update_info: dict[str, Any], load: Load, check: Check) -> None:
        with CheckpointReader(Path(_given(update_info, "path", str))) as reader:
            shapes = {name: reader.shape(name) for name in reader.names}
            check(list(shapes.items()))
            # all at once: what comes in parts is copied
            load(
                [
                    (name, reader.view(name, each, (slice(None),) * len(each), ANY_DTYPE))
                    for name, each in shapes.items()
                ]
            )


class Distributed:
    """Broadcasts of torch.distributed, from the trainer, which has rank 0: by Gloo, or by NCCL to GPUs."""

    def __init__(self, rank: int, device: torch.device, timeout_s: float) -> None:
        self._rank, self._device, self._timeout_s = rank, device, timeout_s
        self._group: Any = None
        self._is_packed = False
        self._buffer: Tensor | None = None
        """Where buckets come. Kept during an update: a process writes to new memory at a fraction of the speed."""

    def connect(self, init_info: dict[str, Any]) -> None:
        """Join the group. Keys are vLLM's: master_address, master_port, rank_offset, world_size and packed."""
        from raycore.parts.weights.transfer.group import WeightGroup  # imported lazily: few workers need it

        self.disconnect()
        rank = _given(init_info, "rank_offset", int) + self._rank
        size = _given(init_info, "world_size", int)
        if not 0 < rank < size:
            raise InvalidInput(
                f"init_info: this worker is rank {rank} of world_size={size}: count the trainer and all workers"
            )
        address, port = _given(init_info, "master_address", str), _given(init_info, "master_port", int)
        self._group = WeightGroup(address, port, rank, size, self._timeout_s, self._device)
        self._is_packed = bool(init_info.get("packed", False))

    def receive(self, update_info: dict[str, Any], load: Load, check: Check) -> None:
        if self._group is None:
            raise InvalidInput("init_weight_transfer_engine() comes first: this worker isn't connected to a trainer")
        likes = _announced(update_info, check)
        if update_info.get("packed", self._is_packed):
            bucket_bytes: Any = update_info.get("packed_buffer_size_bytes", PACKED_BYTES)
            if type(bucket_bytes) is not int or bucket_bytes < 1:  # True is an int, too
                raise InvalidInput(f"packed_buffer_size_bytes={bucket_bytes!r} isn't a number of bytes")
            for some in divided(likes, bucket_bytes):
                layout = layout_of(some)
                buffer = self._room(size_of(layout))
                self._group.broadcast(buffer)
                load(unpack(layout, buffer))
            return
        for name, like in likes:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            self._group.broadcast(tensor)
            load([(name, tensor)])

    def _room(self, num_bytes: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < num_bytes:
            self._buffer = None  # so that there is never more than one
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]

    def end_update(self) -> None:
        self._buffer = None

    def disconnect(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of an object: a bucket, or a list or a dict of tensors."""
    given: dict[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if set(given) == {"layout", "arrays"}:
        return unpack_object(given)
    pairs: list[Any] = list(given.items() if isinstance(value, dict) else value)
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise InvalidInput("an object of refs has to be a bucket, or a list or dict of tensors with names")
    return pairs


def _announced(update_info: dict[str, Any], check: Check) -> list[tuple[str, Tensor]]:
    """Return tensors without memory that are like those that vLLM's keys announce, after they have been checked."""
    names, dtypes, shapes = (_given(update_info, key, list) for key in ("names", "dtype_names", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidInput("update_info: names, dtype_names and shapes have different lengths")
    described = [(str(name), tuple(map(int, shape))) for name, shape in zip(names, shapes, strict=True)]
    check(described)
    return [
        (name, torch.empty(shape, dtype=dtype_of(dtype), device="meta"))
        for (name, shape), dtype in zip(described, dtypes, strict=True)
    ]


def _given(info: Any, key: str, kind: type) -> Any:
    if not isinstance(info, dict) or not isinstance(cast("dict[str, Any]", info).get(key), kind):
        raise InvalidInput(f"{key} is missing, or isn't a {kind.__name__}")
    return cast("dict[str, Any]", info)[key]
