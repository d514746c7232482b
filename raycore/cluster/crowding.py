"""Says what it costs if a local Ray is to run more ranks than the machine has cores."""

from __future__ import annotations

import logging

from placement.plan import EngineShape
from raycore.node.resources import available_memory_bytes, usable_cores

logger = logging.getLogger(__name__)

_PROCESS_BYTES = 220 << 20
"""About what a worker's process takes besides what it shares with others, without weights and cache. Measured with
torch 2.13 for CPUs."""

_GIB = 1 << 30


def warn_if_crowded(shape: EngineShape, num_ranks: int) -> None:
    """Warn if this machine has fewer cores than the engine is about to have ranks."""
    if shape.gpus_per_worker == 0:
        text = crowding(shape, num_ranks, usable_cores(), available_memory_bytes())
        if text is not None:
            logger.warning("%s", text)


def crowding(shape: EngineShape, num_ranks: int, num_cores: int, free_bytes: int) -> str | None:
    """What so many ranks cost on a machine with so many cores and bytes. None: there are cores enough."""
    if num_ranks <= num_cores:
        return None
    num_processes = num_ranks * len(shape.bundles)
    needed = num_processes * _PROCESS_BYTES
    fits = "" if needed <= free_bytes else ", so they won't fit"
    return (
        f"data_parallel_size={num_ranks} starts {num_processes} processes on {num_cores} cores. They share these, so "
        f"more ranks than cores make nothing faster, and take at least {needed / _GIB:.1f} GiB besides weights and "
        f"caches, of {free_bytes / _GIB:.1f} GiB that are free{fits}"
    )
