"""Ray clusters on this machine for engines that are disturbed, and what is left of these engines at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import shared_memory
from common import let_processes_import

from raycore import AsyncLLM
from raycore.node.processes import is_running

_LEFT_S = 10.0
"""How long Ray's tables may lag behind its processes, in seconds."""


class Cluster:
    """A Ray cluster that this program has joined. This one has a single node."""

    def __init__(self, num_ranks: int, num_workers: int) -> None:
        """`num_workers`: of a rank."""
        self._files_before = shared_memory.files()
        let_processes_import(Path(__file__).parents[1])
        self._start(num_ranks, 1 + num_workers)  # a rank has an engine, too

    def _start(self, num_ranks: int, cpus_per_rank: int) -> None:
        options: dict[str, Any] = {"object_store_memory": 200 << 20, "include_dashboard": False}
        num_cpus = num_ranks * cpus_per_rank
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level=logging.ERROR, **options)

    @property
    def can_remove(self) -> bool:
        """Whether a node can be removed now."""
        return False

    def remove(self, node_id: str) -> None:
        """Crash a node."""
        raise AssertionError("the only node can't be removed")

    def close(self) -> list[str]:
        """End the cluster. Returns the files that it has left in shared memory."""
        ray.shutdown()
        return shared_memory.abandoned_since(self._files_before)


class Nodes(Cluster):
    """A cluster with a head for this program, and more nodes than ranks. Nodes can be removed."""

    def __init__(self, num_ranks: int, num_workers: int, num_spare: int) -> None:
        """`num_workers`: of a rank. `num_spare`: nodes in addition to one per rank, which can be removed."""
        self._num_needed = num_ranks
        self._num_spare = num_spare
        super().__init__(num_ranks, num_workers)

    def _start(self, num_ranks: int, cpus_per_rank: int) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        options: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False}
        self._cluster = RayCluster(initialize_head=True, head_node_args=options | {"num_cpus": 0})
        options["num_cpus"] = cpus_per_rank
        self._nodes = [self._cluster.add_node(**options) for _ in range(num_ranks + self._num_spare)]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    @property
    def can_remove(self) -> bool:
        """Whether a node can be removed now."""
        return len(self._nodes) > self._num_needed

    def remove(self, node_id: str) -> None:
        """Crash a node."""
        node = next(node for node in self._nodes if node.node_id == node_id)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> list[str]:
        """End the cluster. Returns the files that it has left in shared memory."""
        ray.shutdown()
        self._cluster.shutdown()
        return super().close()


def process_ids(llm: AsyncLLM) -> set[int]:
    """The processes of the ranks that serve."""
    return {pid for info in llm.engine_infos for pid in (info.pid, *info.worker_pids)}


def leftovers(pids: Iterable[int]) -> list[str]:
    """What is left of engines that have been shut down: processes, of `pids`, actors and placement groups."""
    deadline_s = time.monotonic() + _LEFT_S
    while True:
        left = [f"process {pid}" for pid in pids if is_running(pid)]
        left += [f"actor {name}" for name in ray.util.list_named_actors() if name.startswith("raycore")]
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        left += [f"placement group {group['name']}" for group in groups]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)
