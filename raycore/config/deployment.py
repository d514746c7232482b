"""Data parallelism over several servers, under the names of vLLM's options. Does not import torch.

With internal load balancing, the default, one server has all ranks. With the others, several servers have a part of the
ranks each, and something outside chooses among the servers. Here, each of these servers then runs an engine of its own,
whose ranks are on the server's node. So a server that dies takes nobody else's requests with it. If ranks share
experts, those of all servers step together (`parts/servers`).
"""

from __future__ import annotations

from msgspec.structs import replace

from raycore.config.parallel import MAX_RANKS, ParallelConfig
from raycore.errors import InvalidConfig


def deployed(parallel: ParallelConfig) -> ParallelConfig:
    """Return what the options of a deployment mean for the engine of one server.

    Raises:
        InvalidConfig: the options contradict each other.
    """
    total = parallel.data_parallel_size
    first, count = _external_part(parallel) or _hybrid_part(parallel) or (0, total)
    if first + count > total:
        ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
        raise InvalidConfig(f"data_parallel_size={total} has no {ranks}: {_given(parallel)}")
    spans = parallel.placement_strategy == "span"  # a rank that spans nodes can't be on one
    if count == total:
        return replace(parallel, num_on_own_node=None if spans else _num_local(parallel))
    return replace(
        parallel,
        data_parallel_size=count,
        first_rank=first,
        num_ranks_of_servers=total if parallel.enable_expert_parallel else 0,
        num_ranks_before=first,
        num_on_own_node=None if spans else MAX_RANKS,
    )


def _external_part(parallel: ParallelConfig) -> tuple[int, int] | None:
    """Return the first rank and the number of ranks of a server with one rank. None: it isn't one."""
    if parallel.data_parallel_external_lb and parallel.data_parallel_hybrid_lb:
        raise InvalidConfig("data_parallel_external_lb=True and data_parallel_hybrid_lb=True exclude each other")
    rank = parallel.data_parallel_rank
    if rank is None:
        if parallel.data_parallel_external_lb and parallel.data_parallel_size > 1:
            raise InvalidConfig(
                "data_parallel_external_lb=True needs data_parallel_rank, the number of this server's rank"
            )
        return None
    if parallel.data_parallel_hybrid_lb or parallel.data_parallel_size_local not in (None, 1):
        raise InvalidConfig(
            f"{_given(parallel)}: a server with data_parallel_rank={rank} has one rank. Omit data_parallel_rank, or "
            "the others"
        )
    return rank, 1


def _hybrid_part(parallel: ParallelConfig) -> tuple[int, int] | None:
    """Return the first rank and the number of ranks of a server that has its node's. None: it has all ranks."""
    count, first = parallel.data_parallel_size_local, parallel.data_parallel_start_rank
    if not parallel.data_parallel_hybrid_lb and first is None:
        return None
    if not count:
        raise InvalidConfig(
            f"{_given(parallel)} needs data_parallel_size_local, the number of ranks on this server's node, at least 1"
        )
    return first or 0, count


def _num_local(parallel: ParallelConfig) -> int | None:
    """Return how many ranks of a server that has all of them are on its node. None: any number."""
    local, total = parallel.data_parallel_size_local, parallel.data_parallel_size
    if local is not None and local > total:
        raise InvalidConfig(f"data_parallel_size_local={local} is more than data_parallel_size={total}")
    return local


def _given(parallel: ParallelConfig) -> str:
    names = (
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
    )
    values = {name: getattr(parallel, name) for name in names}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None and value is not False)
