"""The states of prefixes as connectors know them: blocks of more groups of layers, after those of the KV cache.

A worker's row of states is moved in parts, each of at most a block's bytes. Part p of all rows is a group of its own,
of which a prefix needs the last block only. The ids of these blocks come after those of the cache's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from raycore.kvcache.snapshots import NO_ROW, Snapshots


class StateBlocks:
    """The rows of `snapshots` as blocks. Without parts, there are none."""

    def __init__(self, snapshots: Snapshots, num_parts: int) -> None:
        """`num_parts`: `KVCacheConfig.num_state_parts`."""
        self.snapshots = snapshots
        self.num_parts = num_parts

    def may_load(self, *, is_async: bool) -> bool:
        """Whether a prefix can be loaded now.

        What a step keeps of a state that it has loaded itself would be wrong if the load has failed. So loads with
        states are asynchronous.
        """
        return not self.num_parts or (is_async and self.snapshots.has_room())

    def reserve(self) -> int:
        """Take a row for the state of a prefix that is loaded. `NO_ROW`: no layer keeps a state."""
        return self.snapshots.reserve() if self.num_parts else NO_ROW

    def blocks_of(self, row: int, num_blocks: int) -> list[int]:
        """The ids of a row's parts. `num_blocks`: number of blocks of the cache."""
        first = num_blocks + row * self.num_parts
        return list(range(first, first + self.num_parts)) if row != NO_ROW else []

    def groups(self, num_groups: int) -> Iterator[int]:
        """The numbers of the parts' groups. `num_groups`: number of groups of the cache."""
        yield from range(num_groups, num_groups + self.num_parts)


NO_STATES = StateBlocks(Snapshots(range(0)), 0)
"""Those of models whose layers keep none."""
