"""The data-parallel rank of an engine, the ranks of a worker, and the import of the worker class.

This module does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from raycore.class_paths import import_class
from raycore.config import EngineConfig, ParallelConfig
from raycore.errors import InvalidConfig
from raycore.plugins import WORKERS, load_general_plugins
from raycore.system import os

if TYPE_CHECKING:
    from raycore.worker.protocol import WorkerProtocol

OWN_WORKER = "raycore.worker.worker.Worker"


class RankIdentity(msgspec.Struct, frozen=True):
    """An engine's data-parallel rank, and the number of workers on its node."""

    dp_rank: int
    """Negative for a standby, which has no rank yet."""
    num_local_workers: int
    """Number of workers of all data-parallel ranks on the engine's node. They share the node's cores and memory."""
    gpu_ids: list[str] = []
    """The GPU of each worker, if the rank has not reserved them itself. Empty: Ray has chosen the GPUs, or there are
    none."""

    workers_on: dict[str, int] = {}
    """The same number for each node on which the rank has workers, by node id, if the rank spans nodes."""

    @property
    def label(self) -> str:
        """The rank's name in logs and titles of processes."""
        return f"dp{self.dp_rank}" if self.dp_rank >= 0 else "standby"

    def num_workers_on(self, node_id: str) -> int:
        """Number of workers of all data-parallel ranks on a node on which this rank has workers."""
        return self.workers_on.get(node_id, self.num_local_workers)

    def gpu_of(self, worker: int) -> str | None:
        """The GPU that a worker has to take. None: that which Ray has assigned to it, or none."""
        return self.gpu_ids[worker] if self.gpu_ids else None


class Regrouping(msgspec.Struct, frozen=True):
    """A change of the number of ranks that share experts, without a restart. Ranks keep their numbers."""

    num_ranks_before: int
    num_ranks: int
    rendezvous: str
    """Address `tcp://host:port` at which the workers of all ranks connect, of those that leave, too."""
    generation: int
    """The number of the new group among all groups that the engine has had."""

    @property
    def num_involved(self) -> int:
        """Number of ranks that take part: those that stay, come and leave."""
        return max(self.num_ranks_before, self.num_ranks)


class MemoryNeed(NamedTuple):
    """What a worker needs for another number of ranks, in bytes."""

    needed: int
    """In addition to what it has allocated."""
    available: int


class WorkerRank(msgspec.Struct, frozen=True):
    """A worker's ranks, and the addresses at which it connects to other workers.

    An engine's workers are numbered stage by stage, in each stage by `pcp_rank`, and then by `tp_rank`.
    """

    dp_rank: int
    tp_rank: int
    tp_size: int
    local_rank: int
    """Index of this worker among the workers of the same engine on the same node."""
    num_local_workers: int
    """Number of workers of all data-parallel ranks on this node. They share the node's cores and memory."""
    distributed_init: str | None = None
    """Address `tcp://host:port` at which this engine's workers meet. None for a single worker. Worker 0's process
    listens there: `raycore.node.listeners.claim()` returns its socket."""
    ep_rank: int = 0
    ep_size: int = 1
    """Number of workers that whole experts are spread over, those of the same stage. 1 without expert parallelism."""
    rendezvous: str | None = None
    """Such an address for the workers of all engines, if they share experts; otherwise None."""
    gpu_id: str | None = None
    """The GPU that the worker has to take. None: that which its process sees already, or none."""
    pp_rank: int = 0
    """The stage of the pipeline that this worker computes."""
    pp_size: int = 1
    pcp_rank: int = 0
    """This worker's number among the `pcp_size` workers that compute the same, with other tokens' keys and values."""
    pcp_size: int = 1
    dcp_size: int = 1
    """Number of tensor-parallel ranks with other tokens' keys and values of the same heads. They are neighbors."""
    num_ranks_before: int = 0
    """Number of ranks that share experts with this worker's and belong to servers before its own."""
    is_new: bool = False
    """Whether this worker joins others that already run. It loads no weights: `regroup()` brings them."""

    @property
    def worker(self) -> int:
        """This worker's number among those of its engine."""
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    @property
    def sharing_rank(self) -> int:
        """The number of this worker's rank among those that share experts."""
        return self.num_ranks_before + self.dp_rank

    @property
    def number_among_all(self) -> int:
        """This worker's number among those of all engines."""
        return self.sharing_rank * self.world_size + self.worker

    def __index__(self) -> int:
        """The number `worker`: methods of `worker_extension_cls` may compute with `self.rank`."""
        return self.worker

    def __add__(self, other: int) -> int:
        return self.worker + other

    __radd__ = __add__

    @property
    def world_size(self) -> int:
        """Number of workers of the engine."""
        return self.pp_size * self.pcp_size * self.tp_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker's stage has the head, and samples."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_steps(self) -> bool:
        """Whether this is the worker of its engine that returns the results of steps: the first of the last stage."""
        return self.is_last_stage and self.pcp_rank == self.tp_rank == 0

    @property
    def context_rank(self) -> int:
        """This worker's number among those that have other tokens' keys and values of the same heads."""
        return self.pcp_rank * self.dcp_size + self.tp_rank % self.dcp_size

    @property
    def context_size(self) -> int:
        """Number of these workers."""
        return self.pcp_size * self.dcp_size

    @property
    def label(self) -> str:
        """This worker's name in log lines and its process's title, such as `dp0 tp1`.

        In other dimensions than these, it is named if the workers differ in them: `dp0 pp1 pcp0 tp1 dcp1 ep1`.
        """
        stage = f" pp{self.pp_rank}" if self.pp_size > 1 else ""
        context = f" pcp{self.pcp_rank}" if self.pcp_size > 1 else ""
        divided = f" dcp{self.tp_rank % self.dcp_size}" if self.dcp_size > 1 else ""
        experts = f" ep{self.ep_rank}" if self.ep_size > 1 else ""
        return f"dp{self.dp_rank}{stage}{context} tp{self.tp_rank}{divided}{experts}"

    def take_gpu(self) -> None:
        """Make `gpu_id` the only GPU that this process sees. It must not have used CUDA yet."""
        if self.gpu_id is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu_id

    def with_experts(self, config: ParallelConfig, rendezvous: str | None) -> WorkerRank:
        """With `enable_expert_parallel`, a copy with `ep_rank`, `ep_size` and `rendezvous` set; else this object."""
        if not config.enable_expert_parallel:
            return self
        num_before = config.num_ranks_before if config.num_ranks_of_servers else 0
        ep_rank = (num_before + self.dp_rank) * self.tp_size + self.tp_rank
        return msgspec.structs.replace(
            self,
            ep_rank=ep_rank,
            ep_size=config.num_sharing * self.tp_size,
            rendezvous=rendezvous,
            num_ranks_before=num_before,
        )


def preload_worker(config: EngineConfig) -> None:
    """Import what a worker of this engine needs until it is ready, which takes seconds.

    Raises:
        InvalidConfig: a general plugin failed, or the worker class cannot be imported.
    """
    load_general_plugins(config.plugins)
    load_worker_class(config.parallel)
    if config.device == "cuda":
        for module in ("raycore.attention.paged", "raycore.layers.gpu_operations", "raycore.sampling.gpu"):
            with suppress(ImportError):  # without Triton, the worker says later what is slower
                importlib.import_module(module)


def load_worker_class(config: ParallelConfig) -> Callable[[EngineConfig, WorkerRank], WorkerProtocol]:
    """Import and return the class that `worker_cls` names, by default raycore's own, which imports torch.

    Raises:
        InvalidConfig: the class cannot be imported.
    """
    worker = import_class("worker_cls", config.worker_cls or OWN_WORKER, WORKERS)
    if config.worker_extension_cls is None:
        return worker
    extension = import_class("worker_extension_cls", config.worker_extension_cls, WORKERS)
    both = [name for name in dir(extension) if not name.startswith("__") and hasattr(worker, name)]
    if both:
        raise InvalidConfig(
            f"worker_extension_cls={config.worker_extension_cls!r} has {both[0]}, which workers have themselves: "
            "rename it, or replace the worker's own with worker_cls"
        )
    return type(worker.__name__, (worker, extension), {})
