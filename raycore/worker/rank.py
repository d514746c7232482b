"""Which worker a process is to be: its class, and its place among the others. Knows no torch."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from raycore.config import ParallelConfig
from raycore.errors import InvalidConfig

OWN_WORKER = "raycore.worker.worker.Worker"


class WorkerRank(msgspec.Struct, frozen=True):
    """A worker's place among the others."""

    dp_rank: int
    tp_rank: int
    tp_size: int
    local_rank: int
    """Place among the workers of the same engine on the same node."""
    num_local_workers: int
    """Workers of all engines on this node, which share its cores."""
    distributed_init: str | None = None
    """Where the engine's workers meet, `tcp://host:port`; None: there is only one."""
    ep_rank: int = 0
    ep_size: int = 1
    """Workers that have whole experts each; 1: experts are split over the engine's workers, or there are none."""
    ep_init: str | None = None
    """Where these workers meet, if they are of several engines."""

    def with_experts(self, config: ParallelConfig, ep_init: str | None) -> WorkerRank:
        """The same place, among those that share experts."""
        if not config.enable_expert_parallel:
            return self
        ep_rank = self.dp_rank * self.tp_size + self.tp_rank
        ep_size = config.data_parallel_size * self.tp_size
        return msgspec.structs.replace(self, ep_rank=ep_rank, ep_size=ep_size, ep_init=ep_init)


def load_worker_class(config: ParallelConfig) -> type[Any]:
    """The class that `worker_cls` names, raycore's own by default. Imports torch, as a rule.

    Raises:
        InvalidConfig: there is no such class.
    """
    path = config.worker_cls or OWN_WORKER
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise InvalidConfig(
            f"worker_cls={path!r} can't be imported ({error}): name a class as package.module.Class, in a module that "
            "every node of the cluster can import"
        ) from error
