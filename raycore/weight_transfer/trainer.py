"""The trainer's side: small functions that send weights to an engine. They need torch, and no engine in the process.

`update_weights` is the engine's call: `llm.update_weights`, or a function that calls it in another process. All of it
happens between the engine's `start_weight_update()` and `finish_weight_update()`. Tensors have the names and the whole
shapes that they have in the checkpoint, and come in any order.
"""

from __future__ import annotations

__all__ = [
    "BUCKET_BYTES",
    "join_weight_group",
    "send_weights_distributed",
    "send_weights_ray",
    "send_weights_shared_memory",
]

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor

from raycore.weight_transfer.buckets import BUCKET_BYTES, divided, pack, pack_object
from raycore.weight_transfer.group import TRAINER, WeightGroup

UpdateWeights = Callable[[dict[str, Any]], object]
Weights = Iterable[tuple[str, Tensor]]


def send_weights_ray(update_weights: UpdateWeights, weights: Weights, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Put weights into Ray's object store, bucket by bucket, and have the engine's workers read them there.

    For `weight_transfer_config={"backend": "ray"}`. The store holds two buckets at a time.
    """
    from raycore.weight_transfer.references import put  # imported lazily: imports Ray

    _update_while_preparing(
        update_weights, ({"refs": [put(pack_object(some))]} for some in divided(weights, bucket_bytes))
    )


def send_weights_shared_memory(
    update_weights: UpdateWeights, weights: Weights, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Copy weights into shared memory, bucket by bucket, where the engine's workers on this node read them.

    For `weight_transfer_config={"backend": "ipc"}`. Two segments are used in turn, and removed in the end.
    """
    segments: list[SharedMemory | None] = [None, None]

    def allocate(num_bytes: int) -> Tensor:
        if segments[0] is None or segments[0].size < num_bytes:
            _remove(segments[0])
            segments[0] = SharedMemory(create=True, size=max(num_bytes, bucket_bytes))
        return torch.frombuffer(segments[0].buf, dtype=torch.uint8)[:num_bytes]

    def filled() -> Iterator[dict[str, Any]]:
        for some in divided(weights, bucket_bytes):
            segments.reverse()
            layout = [tuple(entry) for entry in pack(some, allocate)[0]]
            assert segments[0] is not None
            yield {"segments": [{"name": segments[0].name, "layout": layout}]}

    try:
        _update_while_preparing(update_weights, filled())
    finally:
        for segment in segments:
            _remove(segment)


def join_weight_group(
    address: str, port: int, world_size: int, timeout_s: float = 300, device: torch.device | None = None
) -> WeightGroup:
    """Listen at `address:port` until all workers have joined. For `weight_transfer_config={"backend": "nccl"}`.

    Meanwhile, the engine's `init_weight_transfer_engine` has to be called in another thread or process, with
    `{"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}`.

    Args:
        world_size: the number of all workers of the engine, and one more.
        device: of the tensors that will be sent. None: the CPU.

    Raises:
        RaycoreError: they haven't all joined within `timeout_s`.
    """
    return WeightGroup(address, port, TRAINER, world_size, timeout_s, device)


def send_weights_distributed(
    group: WeightGroup, update_weights: UpdateWeights, weights: Weights, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Broadcast weights to all workers of a group, bucket by bucket.

    Raises:
        RaycoreError: a worker is gone, or doesn't take part in time. The group can't be used then.
    """
    buffer, device = torch.empty(0, dtype=torch.uint8), torch.device("cpu")

    def allocate(num_bytes: int) -> Tensor:
        nonlocal buffer
        if len(buffer) < num_bytes or buffer.device != device:
            buffer = torch.empty(max(num_bytes, bucket_bytes), dtype=torch.uint8, device=device)
        return buffer[:num_bytes]

    with ThreadPoolExecutor(1) as pool:
        for some in divided(weights, bucket_bytes):
            device = some[0][1].device
            layout, packed = pack(some, allocate)
            call = pool.submit(
                update_weights,
                {
                    "names": [entry.name for entry in layout],
                    "dtype_names": [entry.dtype for entry in layout],
                    "shapes": [list(entry.shape) for entry in layout],
                    "packed": True,
                },
            )
            if call.done():
                call.result()  # the workers have refused the names, and won't take part
            group.broadcast(packed)
            call.result()


def _update_while_preparing(update_weights: UpdateWeights, infos: Iterable[dict[str, Any]]) -> None:
    """Call `update_weights` with one after the other. Meanwhile `infos` makes the next one."""
    with ThreadPoolExecutor(1) as pool:
        call: Future[object] | None = None
        for info in infos:
            if call is not None:
                call.result()
            call = pool.submit(update_weights, info)
        if call is not None:
            call.result()


def _remove(segment: SharedMemory | None) -> None:
    if segment is not None:
        with suppress(BufferError):  # a tensor still has the memory, which is freed with it
            segment.close()
        segment.unlink()
