"""Moves the memory of tensors on a device to the host and back. The tensors themselves stay, and their views with them.

So whatever has a reference to a weight, in whatever layout its kernel wants, finds the weight again afterwards. Weights
that were changed in place since they were loaded keep their changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from raycore.errors import RaycoreError
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import ExpertParallel
from raycore.weights.object_parts import named_parts

SHARED = (TensorParallel, ExpertParallel)
"""Classes of objects whose buffers other processes may use, too. Their memory stays where it is."""


def tensors_of(root: object, device: torch.device) -> list[Tensor]:
    """Return all tensors on `device` that can be reached from `root`, each once. Leaves out buffers of collectives."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, SHARED):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if each.device.type == device.type:
                found[id(each)] = each
        else:
            waiting += [part for _, part in named_parts(each)]
    return list(found.values())


class OffloadedTensors:
    """The memory of tensors, in the host's memory. The tensors can't be used until `restore()`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory of `tensors` to the host, and free it on the device.

        Copies are in pinned memory if there is enough of it, because that is twice as fast to copy back.
        """
        storages = {storage.data_ptr(): storage for storage in (each.untyped_storage() for each in tensors)}
        storages.pop(0, None)  # empty ones
        self._copies: list[tuple[UntypedStorage, Tensor]] = [(each, _on_host(each)) for each in storages.values()]
        for storage, _ in self._copies:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """The size of all copies together."""
        return sum(copy.numel() for _, copy in self._copies)

    def restore(self) -> None:
        """Allocate the memory on the device again, and copy the content back. Call this once.

        Raises:
            RaycoreError: the device has too little memory.
        """
        for storage, copy in self._copies:
            try:
                storage.resize_(copy.numel())
            except torch.OutOfMemoryError as error:
                raise RaycoreError(
                    f"{self.num_bytes} bytes of weights have to return to {storage.device}, which has too little free "
                    f"memory: {error}"
                ) from error
            _as_bytes(storage).copy_(copy)
        self._copies = []


def _on_host(storage: UntypedStorage) -> Tensor:
    source = _as_bytes(storage)
    try:
        copy = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
    except RuntimeError:  # not enough memory can be pinned
        copy = torch.empty(source.numel(), dtype=torch.uint8)
    return copy.copy_(source)


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
