"""How workers that compute a model together find each other, and form groups."""

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import datetime

import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from raycore.parallel.collectives import Collectives, TorchCollectives, make_collectives
from raycore.parallel.default_group import DefaultGroup
from raycore.parallel.links import DEFAULT_AHEAD, Link, TorchLink, make_link


class Rendezvous:
    """The workers that meet at one address. Each forms its groups, and then calls `part`."""

    def __init__(self, address: str, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Connect to the other workers at `address`, `tcp://host:port`, where rank 0 of the `size` workers listens.

        Args:
            timeout_s: how long this worker waits for others, here and in its groups, in seconds.

        Raises:
            torch.distributed.DistError: not all workers connected in time.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        timeout = datetime.timedelta(seconds=timeout_s)
        self._store: TCPStore | None = TCPStore(host.strip("[]"), int(port), size, rank == 0, timeout)
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout_s = timeout_s
        self._needs_store = False

    def collectives(self, name: str, rank: int, size: int, *, batch_invariant: bool = False) -> Collectives:
        """Form the group `name` as its rank `rank` of `size`. See `make_collectives`."""
        group = make_collectives(
            self._store_of(name), rank, size, self._device, self._timeout_s, batch_invariant=batch_invariant
        )
        self._needs_store |= isinstance(group, TorchCollectives)
        return group

    def link(self, name: str, *, sends: bool, capacity_bytes: int, num_ahead: int = DEFAULT_AHEAD) -> Link:
        """Form the link `name` with one other worker. See `make_link`."""
        link = make_link(
            self._store_of(name),
            sends=sends,
            device=self._device,
            capacity_bytes=capacity_bytes,
            timeout_s=self._timeout_s,
            num_ahead=num_ahead,
        )
        self._needs_store |= isinstance(link, TorchLink)
        return link

    def default_group(self) -> DefaultGroup:
        """Form torch's default process group of all these workers. See `DefaultGroup`."""
        self._needs_store = True
        return DefaultGroup(self._store_of("default group"), self._rank, self._size, self._device, self._timeout_s)

    def part(self) -> None:
        """Stop using the store, unless a worker's groups go on using it.

        Rank 0, whose process holds the store, waits here until all workers have called this.
        """
        assert self._store is not None, "called once"
        self._store.set(f"parts/{self._rank}", "needs it" if self._needs_store else "")
        if self._rank == 0:
            needs = [self._store.get(f"parts/{other}") for other in range(self._size)]
            self._needs_store = any(needs)
        if not self._needs_store:
            self._store = None

    def close(self) -> None:
        """Give the store up. Idempotent."""
        self._store = None

    def _store_of(self, name: str) -> PrefixStore:
        assert self._store is not None, "groups are formed before part()"
        return PrefixStore(name, self._store)
