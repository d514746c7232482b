"""Copies between the host's memory and a device's. No copy waits for the device, unless its result is asked for.

On a CPU, both are the same memory, and nothing is copied. To a GPU, values go through pinned memory, from which the GPU
copies by itself, in the order of its stream. PyTorch reuses pinned memory only after such copies are over.
"""

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Arrays that are copied together begin at multiples of this number of bytes."""
_SPIN_S = 200e-6
"""How long, in seconds, a thread that waits for a copy looks for its end without a pause."""
_PAUSE_S = 50e-6


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a tensor of `values`, which may be a field of records. On a CPU, it may share their memory."""
    tensor = torch.as_tensor(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Return a tensor for each of the contiguous `arrays`, all of which go to the device in one copy."""
    if device.type == "cpu":
        return [torch.as_tensor(array) for array in arrays]
    inputs = DeviceInputs(arrays, device)
    inputs.fill(arrays)
    return inputs.tensors


class DeviceInputs:
    """Tensors on a device that are filled together, by one copy, as often as needed."""

    def __init__(self, arrays: Sequence[NDArray[np.generic]], device: torch.device) -> None:
        """Allocate a tensor for each of `arrays`, with its shape and dtype."""
        self._starts = [0]
        for array in arrays:
            self._starts.append(self._starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=device)
        self.tensors = [
            self._memory[start : start + array.nbytes]
            .view(torch.as_tensor(np.empty(0, array.dtype)).dtype)
            .view(array.shape)
            for array, start in zip(arrays, self._starts, strict=False)
        ]
        """On the device, in the order of the arrays."""

    def fill(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        """Copy contiguous arrays, of the shapes and dtypes that the constructor got, into the tensors."""
        is_cuda = self._memory.device.type == "cuda"
        # new memory, because the copy of the last call may not be over
        pinned = torch.empty(self._starts[-1], dtype=torch.uint8, pin_memory=is_cuda)
        memory = pinned.numpy()
        for array, start in zip(arrays, self._starts, strict=False):
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._memory.copy_(pinned, non_blocking=True)


class Download:
    """Tensors on their way to the host. The copy begins when the device has computed them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copy. On a CPU, the tensors must not be changed afterwards."""
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._tensors = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(self._tensors, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def done(self) -> bool:
        """Whether the copy is over."""
        return self._event is None or self._event.query()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the copy.

        Raises:
            TimeoutError: the copy isn't over after `timeout_s` seconds. None: wait without limit.
        """
        started_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - started_s
            if timeout_s is not None and waited_s > timeout_s:
                raise TimeoutError(f"the device hasn't finished within {timeout_s:g} s")
            if waited_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)

    def arrays(self) -> list[NDArray[np.generic]]:
        """Wait for the end of the copy, and return the tensors as arrays, in order."""
        self.wait()
        return [tensor.numpy() for tensor in self._tensors]
