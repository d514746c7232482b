"""Which ranks there are: of an engine, and of a worker; and which class a worker is. Knows no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from raycore.config import EngineConfig, ParallelConfig
from raycore.errors import InvalidConfig

if TYPE_CHECKING:
    from raycore.worker.protocol import WorkerProtocol

OWN_WORKER = "raycore.worker.worker.Worker"


class RankIdentity(msgspec.Struct, frozen=True):
    """Which data-parallel rank an engine is, and what its node has to be shared with."""

    dp_rank: int
    """Below 0: a standby, which has yet to become a rank."""
    num_local_workers: int
    """Workers of all engines on the rank's node, which share its cores and memory."""


class WorkerRank(msgspec.Struct, frozen=True):
    """A worker's position among the others."""

    dp_rank: int
    tp_rank: int
    tp_size: int
    local_rank: int
    """Number among the workers of the same engine on the same node."""
    num_local_workers: int
    """Workers of all engines on this node, which share its cores."""
    distributed_init: str | None = None
    """Where the engine's workers meet, `tcp://host:port`. None if there is only one."""
    ep_rank: int = 0
    ep_size: int = 1
    """Workers that hold whole experts. 1: experts are split over the engine's workers, or there are none."""
    rendezvous: str | None = None
    """Where the workers of all engines meet, `tcp://host:port`, if they share experts."""

    def with_experts(self, config: ParallelConfig, rendezvous: str | None) -> WorkerRank:
        """The same rank, with its position among the workers that share experts."""
        if not config.enable_expert_parallel:
            return self
        ep_rank = self.dp_rank * self.tp_size + self.tp_rank
        ep_size = config.data_parallel_size * self.tp_size
        return msgspec.structs.replace(self, ep_rank=ep_rank, ep_size=ep_size, rendezvous=rendezvous)


def load_worker_class(config: ParallelConfig) -> Callable[[EngineConfig, WorkerRank], WorkerProtocol]:
    """The class that `worker_cls` names, or raycore's own. Importing it imports torch, as a rule.

    Raises:
        InvalidConfig: the class cannot be imported.
    """
    path = config.worker_cls or OWN_WORKER
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise InvalidConfig(
            f"worker_cls={path!r} cannot be imported ({error}): name a class as package.module.Class, in a module that "
            "every node of the cluster can import"
        ) from error
