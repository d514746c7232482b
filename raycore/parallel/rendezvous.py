"""How workers that compute a model together find each other, and form groups."""

from __future__ import annotations

import torch

from raycore.parallel.collectives import Collectives, make_collectives
from raycore.parallel.default_group import DefaultGroup
from raycore.parallel.links import DEFAULT_AHEAD, Link, make_link
from raycore.parallel.meeting import Meeting
from raycore.parallel.room import Room


class Rendezvous:
    """The workers that meet at one address. Each forms its groups, and then calls `part`.

    When a worker fails or is gone, the others raise `PeerFailed` instead of waiting for it, here and in their groups,
    until they `close`.
    """

    def __init__(
        self, address: str, rank: int, size: int, device: torch.device, timeout_s: float, name: str | None = None
    ) -> None:
        """Connect to `address`, `tcp://host:port`, which the process of rank 0 has offered.

        Args:
            timeout_s: how long this worker waits for others, here and in its groups, in seconds.
            name: what the others call this worker when it fails.

        Raises:
            PeerFailed: rank 0 is gone, or out of reach.
        """
        self._meeting = Meeting(address, rank, size, timeout_s, name)
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout_s = timeout_s

    def collectives(self, name: str, rank: int, size: int, *, batch_invariant: bool = False) -> Collectives:
        """Form the group `name` as its rank `rank` of `size`. See `make_collectives`."""
        return make_collectives(
            Room(self._meeting, name, self._timeout_s),
            rank,
            size,
            self._device,
            self._timeout_s,
            batch_invariant=batch_invariant,
        )

    def link(self, name: str, *, sends: bool, capacity_bytes: int, num_ahead: int = DEFAULT_AHEAD) -> Link:
        """Form the link `name` with one other worker. See `make_link`."""
        return make_link(
            Room(self._meeting, name, self._timeout_s),
            sends=sends,
            device=self._device,
            capacity_bytes=capacity_bytes,
            timeout_s=self._timeout_s,
            num_ahead=num_ahead,
        )

    def default_group(self) -> DefaultGroup:
        """Form torch's default process group of all these workers. See `DefaultGroup`."""
        store = Room(self._meeting, "default group", self._timeout_s).torch_store(self._rank, self._size)
        return DefaultGroup(store, self._rank, self._size, self._device, self._timeout_s)

    def part(self) -> None:
        """Wait until all workers have formed their groups."""
        self._meeting.set(f"parts/{self._rank}", "")
        for other in range(self._size):
            self._meeting.get(f"parts/{other}")

    def fail(self, cause: str) -> None:
        """Tell the other workers that this one has failed."""
        self._meeting.fail(cause)

    def close(self) -> None:
        """Leave the others, which is no failure. Idempotent."""
        self._meeting.leave()
