"""A trainer's end of weight updates: see `raycore.parts.weights`."""

from __future__ import annotations

__all__ = [
    "CUDA_BUCKET_BYTES",
    "SharedBuckets",
    "SharedWeights",
    "broadcast_weights",
    "join_weight_group",
    "send_weights_cuda_ipc",
    "send_weights_distributed",
    "send_weights_ray",
    "send_weights_shared_memory",
]

from raycore.parts.weights.transfer.trainer import (
    CUDA_BUCKET_BYTES,
    SharedBuckets,
    SharedWeights,
    broadcast_weights,
    join_weight_group,
    send_weights_cuda_ipc,
    send_weights_distributed,
    send_weights_ray,
    send_weights_shared_memory,
)
