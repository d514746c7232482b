"""Moves a worker's weights, as they are in memory, to a worker with the same share, through Ray's object store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raycore.errors import RaycoreError
from raycore.parts.weights.transfer.buckets import BUCKET_BYTES, divided, pack_object, unpack_object
from raycore.parts.weights.transfer.references import fetch, lent_reference, put
from raycore.parts.weights.worker.in_place import dense, packed


class ExportedWeights:
    """Weights in the object store. They stay there as long as this object."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: by their paths in the worker's networks."""
        self._refs: list[Any] = []
        whole = [(path, dense(tensor).cpu()) for path, tensor in _without_views(tensors).items()]
        for some in divided(whole, BUCKET_BYTES):
            self._refs.append(put(pack_object(some)))

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """What `import_pieces` takes."""
        return [lent_reference(ref) for ref in self._refs]


def import_pieces(tensors: Mapping[str, Tensor], pieces: list[dict[str, Any]], timeout_s: float) -> None:
    """Give tensors the numbers of those that another worker has exported.

    Raises:
        RaycoreError: the other worker has other tensors.
    """
    waiting = _without_views(tensors)
    for piece in pieces:
        for path, numbers in unpack_object(fetch(piece, timeout_s)):
            into = waiting.pop(path, None)
            if into is None or into.shape != numbers.shape:
                raise RaycoreError(
                    f"the other worker has a tensor {path} of shape {tuple(numbers.shape)}, and this one not"
                )
            with torch.inference_mode():
                if into.dtype == numbers.dtype:
                    into.copy_(packed(numbers, into))
                elif into.is_cuda:
                    raise RaycoreError(f"the other worker has {path} in {numbers.dtype}, and this one in {into.dtype}")
                else:
                    into.data = packed(numbers.clone(), into)  # layers may choose a shorter dtype
    if waiting:
        raise RaycoreError(f"the other worker has no tensor {next(iter(waiting))}")


def _without_views(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out tensors that have exactly the memory of another one, such as transposed ones, and empty ones."""
    found: dict[Any, str] = {}
    for path in sorted(tensors):
        tensor = tensors[path]
        if tensor.numel() and tensor.is_mkldnn:
            found[path] = path
        elif tensor.numel():
            steps = sorted(zip(tensor.shape, tensor.stride(), strict=True))
            found.setdefault((tensor.data_ptr(), tensor.dtype, *steps), path)
    return {path: tensors[path] for path in found.values()}
