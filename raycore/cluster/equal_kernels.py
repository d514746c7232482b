"""Checks that all ranks have the same native kernels, or none. A request that moves must get the same bits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raycore.kernels import VARIABLE
from raycore.messages import EngineInfo

Kernels = tuple[str, bool, str] | None
"""See `raycore.kernels.are_compiled`."""


def unequal_kernels(infos: Sequence[EngineInfo], drivers: Kernels) -> str | None:
    """The error if a worker lacks native kernels that another one or the driver has, or has those of other sources.

    Workers that are told to use no kernels aren't counted. Kernels that are there, but can't run on a worker's
    processor, aren't missing. Machines may compile the same sources with different compilers, and for different
    processors: results have the same bits.

    Returns: None if kernels are equal, as far as is known.
    """
    workers = [
        (f"dp_rank {info.dp_rank} on node {info.node_id[:8]}", *each)
        for info in infos
        for each in info.kernels
        if each is not None
    ]
    everywhere = workers if drivers is None else [*workers, ("the driver", *drivers)]
    have = [f"{where} has them in {folder}" for where, folder, are_there, _ in everywhere if are_there]
    lack = [f"{where} finds none in {folder}" for where, folder, are_there, _ in workers if not are_there]
    if have and lack:
        return _error("are missing", lack[0], f"but {have[0]}")
    of_sources = {
        sources: f"{where} has those of the sources {sources} in {folder}"
        for where, folder, are_there, sources in workers
        if are_there and sources
    }
    if len(of_sources) > 1:
        first, second, *_ = of_sources.values()
        return _error("differ", first, f"and {second}")
    return None


def _error(what: str, one: str, another: str) -> str:
    return (
        f"native kernels for CPUs {what}: {one}, {another}. Results would differ in their last bits. "
        f"Install raycore there again, or set {VARIABLE}=none on all nodes to use plain torch"
    )
