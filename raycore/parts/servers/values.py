"""What servers and their coordinator tell each other."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from raycore.errors import InitializationError


class SharingServer(msgspec.Struct, frozen=True):
    """One of the servers that share experts, as it introduces itself."""

    server_id: str
    """Other than those of all other servers, also of one that had the same ranks before."""
    first_rank: int
    """The number of its first rank, among the ranks of all servers."""
    num_ranks: int
    num_ranks_of_all: int
    """How many ranks all servers have together, if all run."""
    has_served: bool
    """Whether it had a place in a round before, so that all servers were there once."""
    worker_id: str
    """Ray's id of its process."""
    node_id: str
    """The id of the node on which its process is."""
    options: dict[str, str]
    """Those that have to be the same for all servers, by name."""

    @property
    def label(self) -> str:
        """How messages name the server."""
        last = self.first_rank + self.num_ranks - 1
        ranks = f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank} to {last}"
        return f"the server with {ranks}"


class Place(NamedTuple):
    """A server's place in a round: the ranks of some servers that share experts, from their start to their end."""

    round_id: str
    num_ranks: int
    """How many ranks share the experts."""
    num_before: int
    """How many of them belong to servers before this one."""

    @property
    def is_first(self) -> bool:
        """Whether the server is the first one. Its first rank decides for all."""
        return self.num_before == 0


class RoundOver(InitializationError):
    """The ranks of a round can't go on together: the message says why. Those that are left begin another round."""
