"""What an engine can't have with its number of ranks. Its start asks, and so does each change of the number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raycore.errors import InvalidConfig

if TYPE_CHECKING:
    from raycore.config.engine import EngineConfig


def check_num_ranks(config: EngineConfig) -> None:
    """Check that the engine can have `data_parallel_size` ranks with its other options.

    Places that the caller gives, such as `placement_bundle_indices`, aren't compared here: they are those of the ranks
    at the start. A rank that was removed gets its place again, and raycore reserves those of further ranks.

    Raises:
        InvalidConfig: it can't. The message names the number and the option.
        InvalidCheckpoint: saved shares are damaged.
    """
    for refusal in _REFUSALS:
        asked = refusal(config)
        if asked is not None:
            raise InvalidConfig(f"data_parallel_size={config.parallel.data_parallel_size}: {asked}")
    if config.model.load_format == "sharded_state" and config.parallel.enable_expert_parallel:
        config.fitted()  # the files have the experts of a number of ranks


def _only_rank(config: EngineConfig) -> str | None:
    rank = config.parallel.data_parallel_rank
    if rank is None or config.parallel.data_parallel_size == 1:
        return None
    return f"a server with data_parallel_rank={rank} has one rank. Start another server for another rank"


def _ranks_of_servers(config: EngineConfig) -> str | None:
    parallel = config.parallel
    if not parallel.num_ranks_of_servers or parallel.data_parallel_size == (parallel.data_parallel_size_local or 1):
        return None
    return "experts are shared with ranks of other servers. Start or end servers to change the number of all ranks"


_REFUSALS: list[Callable[[EngineConfig], str | None]] = [_only_rank, _ranks_of_servers]
"""What is said of a configuration that can't be. None: it can."""
