"""torch's default process group, which methods of `worker_extension_cls` expect. raycore itself doesn't use it.

A process has at most one. A worker's is that of all workers of its engine.
"""

from __future__ import annotations

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
import datetime

import torch
from torch.distributed import HashStore, Store


class DefaultGroup:
    """The group of the workers of one engine. The process has it until `leave()`."""

    def __init__(self, store: Store | None, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Form the group as its rank `rank` of `size`. If the process has a default group already, that one stays.

        Args:
            store: what the workers share. None: there is one worker.
            timeout_s: how long a worker waits for others, here and in each operation.

        Raises:
            torch.distributed.DistError: not all workers joined in time.
        """
        self._is_own = not torch.distributed.is_initialized()
        if self._is_own:
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=HashStore() if store is None else store,
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )

    def leave(self) -> None:
        """Leave the group. Idempotent."""
        if self._is_own and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._is_own = False
