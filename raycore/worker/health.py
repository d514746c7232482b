"""Whether a worker's device still computes."""

from __future__ import annotations

import torch

_SIZE = 1 << 17
"""Enough that all compute threads of a CPU get a part of a sum. 1 MiB."""


def check_device(device: torch.device) -> None:
    """Add numbers whose sum is known, on the device, after everything that it was given before.

    Raises:
        RuntimeError: the device fails, has no memory left, or finds another sum.
    """
    found, expected = int(torch.arange(_SIZE, device=device).sum()), _SIZE * (_SIZE - 1) // 2
    if found != expected:
        raise RuntimeError(
            f"{device} computes wrongly: the sum of 0 to {_SIZE - 1} is {expected}, and it found {found}"
        )
