"""The trainer's side: small functions that send weights to an engine. They need torch, and no engine in the process.

`update_weights` is the engine's call: `llm.update_weights`, or a function that calls it in another process. All of it
happens between the engine's `start_weight_update()` and `finish_weight_update()`. Tensors have the names and the whole
shapes that they have in the checkpoint, and come in any order.
"""

from __future__ import annotations

# torch's process groups are partially typed:
# pyright: reportUnknownMemberType=false
__all__ = [
    "BUCKET_BYTES",
    "MAX_BUCKETS",
    "SharedBuckets",
    "SharedWeights",
    "broadcast_weights",
    "join_weight_group",
    "send_weights_cuda_ipc",
    "send_weights_distributed",
    "send_weights_ray",
    "send_weights_shared_memory",
]

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raycore.parts.weights.transfer.buckets import (
    BUCKET_BYTES,
    PACKED_BYTES,
    Entry,
    divided,
    layout_of,
    pack,
    pack_object,
    size_of,
    unpack,
)
from raycore.parts.weights.transfer.cuda_handles import Handles, exported
from raycore.parts.weights.transfer.group import TRAINER, WeightGroup
from raycore.system import Future, SharedMemory, ThreadPoolExecutor, os, socket

UpdateWeights = Callable[[dict[str, Any]], object]
Weights = Iterable[tuple[str, Tensor]]
CUDA_BUCKET_BYTES = 1 << 30
"""Large, because each call costs more than what is lent in it, which isn't copied."""
MAX_BUCKETS = 4
"""How many buckets exist at a time: those that workers read, those that are ready, and one that is made."""

_BucketT = TypeVar("_BucketT")


def send_weights_ray(update_weights: UpdateWeights, weights: Weights, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Put weights into Ray's object store, bucket by bucket, and have the engine's workers read them there.

    For `weight_transfer_config={"backend": "ray"}`. The store holds `MAX_BUCKETS` buckets at a time.
    """
    from raycore.parts.weights.transfer.references import put  # imported lazily: imports Ray

    buckets = (put(pack_object(some)) for some in divided(weights, bucket_bytes))
    _send(buckets, lambda refs: update_weights({"refs": refs}))


def send_weights_shared_memory(
    update_weights: UpdateWeights, weights: Weights, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Copy weights into shared memory, bucket by bucket, where the engine's workers on this node read them.

    For `weight_transfer_config={"backend": "ipc"}`. A trainer that sends weights again and again does it faster with a
    `SharedBuckets`, which keeps the memory, or with `SharedWeights`, which doesn't copy.
    """
    with SharedBuckets(bucket_bytes) as buckets:
        buckets.send(update_weights, weights)


class SharedBuckets:
    """Segments of shared memory for weights of a trainer, at most `MAX_BUCKETS`. Use it in a `with` statement.

    They stay until the end of the `with` block, because a process writes to new memory at a fraction of the speed.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._process = os.getpid()
        self._free: list[SharedMemory] = []
        self._used: list[SharedMemory] = []
        """Those of calls that haven't returned, in the order of the buckets."""

    def __enter__(self) -> SharedBuckets:
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the segments are the parent's
        self._free_all()
        while self._free:
            _remove(self._free.pop())

    def send(self, update_weights: UpdateWeights, weights: Weights) -> None:
        """Send weights to an engine, as `send_weights_shared_memory` does."""

        def update(segments: list[dict[str, Any]]) -> None:
            update_weights({"segments": segments})
            self._free += self._used[: len(segments)]
            del self._used[: len(segments)]

        try:
            _send(map(self._fill, divided(weights, self._bucket_bytes)), update)
        finally:
            self._free_all()

    def _fill(self, tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
        layout, _ = pack(tensors, self._allocate)
        return {"name": self._used[-1].name, "layout": [tuple(entry) for entry in layout]}

    def _allocate(self, num_bytes: int) -> Tensor:
        segment = self._free.pop() if self._free else None
        if segment is not None and segment.size < num_bytes:
            _remove(segment)
            segment = None
        segment = segment or SharedMemory(create=True, size=max(num_bytes, self._bucket_bytes))
        self._used.append(segment)
        return torch.frombuffer(segment.buf, dtype=torch.uint8)[:num_bytes]

    def _free_all(self) -> None:
        self._free += self._used
        self._used.clear()


class SharedWeights:
    """Weights of a trainer that live in shared memory, where the engine's workers on this node read them.

    For `weight_transfer_config={"backend": "ipc"}`, and for trainers on CPUs: nothing is copied but into the workers'
    layers. Use it in a `with` statement. The memory is freed when the tensors are gone, too.
    """

    def __init__(self, weights: Weights) -> None:
        """Copy weights into shared memory."""
        given = list(weights)
        self._process = os.getpid()
        self._segment = SharedMemory(create=True, size=max(1, size_of(layout_of(given))))
        # a mapping of its own, which ends with the tensors: that of the segment can be closed while tensors use it
        with Path("/dev/shm", self._segment.name).open("r+b") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self._segment.close()
        try:
            self._layout, _ = pack(given, lambda num_bytes: memory[:num_bytes])
        except BaseException:
            self._segment.unlink()
            raise
        self.tensors = dict(unpack(self._layout, memory))
        """The weights by name. A trainer trains these: `parameter.data = shared.tensors[name]`."""

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._process:  # not in a forked child: the segment is the parent's
            self._segment.unlink()

    def send(self, update_weights: UpdateWeights) -> None:
        """Have the engine's workers read all weights. None may change meanwhile."""
        layout = [tuple(entry) for entry in self._layout]
        update_weights({"segments": [{"name": self._segment.name, "layout": layout}]})


def send_weights_cuda_ipc(
    update_weights: UpdateWeights,
    weights: Weights,
    bucket_bytes: int = CUDA_BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Have the engine's workers on this GPU read weights where they are. Nothing is copied but into their layers.

    For `weight_transfer_config={"backend": "ipc"}`. Needs memory without torch's expandable segments.

    Args:
        weights: in the GPU's memory. None may change meanwhile.
        bucket_bytes: so many bytes are lent at a time. Matters if `weights` makes tensors as they are asked for.
        group: of trainers on the GPUs of the workers, each of which calls this with the same whole tensors, and the
            first of which calls `update_weights`. None: there is one trainer, and all workers are on its GPU.

    Raises:
        InvalidInput: a tensor isn't in a GPU's memory, or its memory has no handle.
    """
    for some in divided(weights, bucket_bytes):
        own = [(name, tensor.detach().contiguous()) for name, tensor in some]
        handles = exported(tensor for _, tensor in own)
        if group is not None:
            of_all: list[list[Handles]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(of_all, handles, group)
            handles = [
                {uuid: fields for each in same for uuid, fields in each.items()} for same in zip(*of_all, strict=True)
            ]
        if group is None or dist.get_rank(group) == 0:
            update_weights(_announcement(layout_of(own)) | {"ipc_handles": handles})
        if group is not None:
            dist.barrier(group)  # the first trainer's call is over
        del own, some
        torch.cuda.ipc_collect()


def join_weight_group(
    address: str, port: int | socket.socket, world_size: int, timeout_s: float = 300, device: torch.device | None = None
) -> WeightGroup:
    """Listen at `address:port` until all workers have joined. For `weight_transfer_config={"backend": "nccl"}`.

    Meanwhile, the engine's `init_weight_transfer_engine` has to be called in another thread or process, with
    `{"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}`.

    Args:
        port: or a socket that listens there: then no other program takes the port before this call.
        world_size: the number of all workers of the engine, and one more.
        device: of the tensors that will be sent. None: the CPU.

    Raises:
        RaycoreError: they haven't all joined within `timeout_s`.
    """
    return WeightGroup(address, port, TRAINER, world_size, timeout_s, device)


def broadcast_weights(group: WeightGroup, weights: Weights, bucket_bytes: int | None = PACKED_BYTES) -> None:
    """Broadcast weights while one call of the engine's `update_weights` announces all of them, in the same order.

    Args:
        bucket_bytes: so many bytes go at a time. The call has `packed: True`, and `packed_buffer_size_bytes` if it
            isn't the default. None: tensor by tensor. The call has no `packed`.

    Raises:
        RaycoreError: a worker is gone, or doesn't take part.
    """
    if bucket_bytes is None:
        for _, tensor in weights:
            group.broadcast(tensor.detach().contiguous())
        return
    buffer = torch.empty(0, dtype=torch.uint8)
    for some in divided(weights, bucket_bytes):
        device = some[0][1].device

        def allocate(num_bytes: int, device: torch.device = device) -> Tensor:
            nonlocal buffer
            if len(buffer) < num_bytes or buffer.device != device:
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return buffer[:num_bytes]

        group.broadcast(pack(some, allocate)[1])


def send_weights_distributed(
    group: WeightGroup, update_weights: UpdateWeights, weights: Weights, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Broadcast weights to all workers of a group, bucket by bucket.

    Raises:
        RaycoreError: a worker is gone, or doesn't take part. The group can't be used then.
        Exception: that of `update_weights`. Then, too.
    """
    buffers = [torch.empty(0, dtype=torch.uint8)] * 2
    """Two, in turn: one is filled while workers load the other one."""
    device = torch.device("cpu")

    def allocate(num_bytes: int) -> Tensor:
        buffers.reverse()
        if len(buffers[0]) < num_bytes or buffers[0].device != device:
            buffers[0] = torch.empty(max(num_bytes, bucket_bytes), dtype=torch.uint8, device=device)
        return buffers[0][:num_bytes]

    with ThreadPoolExecutor(1) as pool:
        call: Future[object] | None = None
        for some in divided(weights, bucket_bytes):
            device = some[0][1].device
            layout, packed = pack(some, allocate)
            if call is not None:
                call.result()
            one_bucket = {"packed": True, "packed_buffer_size_bytes": bucket_bytes}
            call = pool.submit(update_weights, _announcement(layout) | one_bucket)
            group.broadcast(packed, call)
        if call is not None:
            call.result()


def _send(buckets: Iterable[_BucketT], update: Callable[[list[_BucketT]], object]) -> None:
    """Call `update` in another thread, each time with all buckets that are ready, while `buckets` makes the next ones.

    Calls take time that doesn't depend on the number of buckets. `MAX_BUCKETS` exist at a time.
    """
    with ThreadPoolExecutor(1) as pool:
        call: Future[object] | None = None
        sent: list[_BucketT] = []
        ready: list[_BucketT] = []
        for bucket in buckets:
            ready.append(bucket)
            del bucket  # the last reference to an object of Ray's must not be this one
            if call is not None:
                if not call.done() and len(sent) + len(ready) < MAX_BUCKETS:
                    continue
                call.result()
            sent, ready = ready, []
            call = pool.submit(update, sent)
        if call is not None:
            call.result()
        if ready:
            update(ready)


def _announcement(layout: Iterable[Entry]) -> dict[str, Any]:
    """What vLLM's keys say of tensors that come by another way than `update_info`."""
    names, dtypes, shapes, _ = zip(*layout, strict=True)
    return {"names": list(names), "dtype_names": list(dtypes), "shapes": list(map(list, shapes))}


def _remove(segment: SharedMemory) -> None:
    segment.close()
    segment.unlink()
