"""Checks that all ranks have native kernels, or none. A request that moves must get the same bits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raycore.kernels import VARIABLE
from raycore.messages import EngineInfo

Kernels = tuple[str, bool] | None
"""See `raycore.kernels.are_compiled`."""


def missing_kernels(infos: Sequence[EngineInfo], drivers: Kernels) -> str | None:
    """The error if native kernels are missing for a worker, and there for another one or for the driver. Else None.

    Workers that are told to use no kernels aren't counted. Kernels that are there, but can't run on a worker's
    processor, aren't missing.
    """
    workers = [(f"dp_rank {info.dp_rank} on node {info.node_id[:8]}", each) for info in infos for each in info.kernels]
    everywhere = [(where, each) for where, each in [*workers, ("the driver", drivers)] if each is not None]
    have = [f"{where} has them in {folder}" for where, (folder, are_there) in everywhere if are_there]
    lack = [f"{where} finds none in {each[0]}" for where, each in workers if each is not None and not each[1]]
    if not have or not lack:
        return None
    return (
        f"native kernels for CPUs are missing: {lack[0]}, but {have[0]}. Results would differ in their last bits. "
        f"Install raycore there again, or set {VARIABLE}=none on all nodes to use plain torch"
    )
