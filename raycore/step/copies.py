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
        return [torch.from_numpy(array) for array in arrays]
    inputs = DeviceInputs(arrays, device)
    for own, array in zip(inputs.arrays, arrays, strict=True):
        own[...] = array
    inputs.send()
    return inputs.tensors


class DeviceInputs:
    """Tensors on a device that get their values from the host together, by one copy, as often as needed."""

    def __init__(self, arrays: Sequence[NDArray[np.generic]], device: torch.device) -> None:
        """Allocate a tensor for each of `arrays`, with its shape and dtype."""
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
        host = np.zeros(starts[-1], np.uint8)
        self._host = torch.as_tensor(host)
        self._on_device = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self.arrays: list[NDArray[np.generic]] = []
        """The host's values, to be written before each `send`. In the order of the constructor's arrays."""
        self.tensors: list[Tensor] = []
        """The values on the device, in the same order."""
        for array, start in zip(arrays, starts, strict=False):
            part = slice(start, start + array.nbytes)
            self.arrays.append(host[part].view(array.dtype).reshape(array.shape))
            dtype = torch.as_tensor(np.empty(0, array.dtype)).dtype
            self.tensors.append(self._on_device[part].view(dtype).view(array.shape))

    def send(self) -> None:
        """Copy the host's values into the tensors. The host may overwrite its values at once."""
        values = self._host
        if self._on_device.device.type == "cuda":
            # new memory, because the copy of the last call may not be over
            values = torch.empty(len(values), dtype=torch.uint8, pin_memory=True).copy_(values)
        self._on_device.copy_(values, non_blocking=True)


class Download:
    """Tensors on their way to the host. The copy begins when the device has computed them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copy. On a CPU, the tensors must not be changed afterwards."""
        self._tensors = list(tensors)
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
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
        if self._event is None:
            return
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
