"""The rank of an engine, the ranks of a worker, and the worker class. Does not import torch."""

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
    """An engine's data-parallel rank and the number of workers on its node."""

    dp_rank: int
    """Negative for a standby, which has no rank yet."""
    num_local_workers: int
    """Number of workers on this node, of all engines. They share its cores and memory."""


class WorkerRank(msgspec.Struct, frozen=True):
    """A worker's ranks and the addresses where it meets the other workers."""

    dp_rank: int
    tp_rank: int
    tp_size: int
    local_rank: int
    """Index among this engine's workers on this node."""
    num_local_workers: int
    """Number of workers on this node, of all engines. They share its cores and memory."""
    distributed_init: str | None = None
    """Rendezvous address of this engine's workers, `tcp://host:port`. None if there is only one worker."""
    ep_rank: int = 0
    ep_size: int = 1
    """Number of workers that hold whole experts. 1: the engine's workers split each expert, or there are none."""
    rendezvous: str | None = None
    """Rendezvous address of the workers of all engines, `tcp://host:port`. None unless they share experts."""

    def with_experts(self, config: ParallelConfig, rendezvous: str | None) -> WorkerRank:
        """This rank with its expert-parallel fields set. Unchanged without `enable_expert_parallel`."""
        if not config.enable_expert_parallel:
            return self
        ep_rank = self.dp_rank * self.tp_size + self.tp_rank
        ep_size = config.data_parallel_size * self.tp_size
        return msgspec.structs.replace(self, ep_rank=ep_rank, ep_size=ep_size, rendezvous=rendezvous)


def load_worker_class(config: ParallelConfig) -> Callable[[EngineConfig, WorkerRank], WorkerProtocol]:
    """The class that `worker_cls` names, or raycore's own, whose import also imports torch.

    Raises:
        InvalidConfig: the class cannot be imported.
    """
    path = config.worker_cls or OWN_WORKER
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise InvalidConfig(
            f"worker_cls={path!r} can't be imported in a worker process ({error}): name a class as "
            "package.module.Class, in a module that every node of the cluster can import"
        ) from error
