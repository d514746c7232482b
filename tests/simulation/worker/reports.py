"""What a worker's side of a connector reports: each load and lease once, and reads that fail only for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from raycore.parts.transfers.connectors.connector import WorkerConnector
from raycore.parts.transfers.connectors.offload.orders import orders_decoder
from raycore.parts.transfers.connectors.offload.worker import OffloadWorker
from raycore.parts.transfers.connectors.peers.notes import Arrived, ToWorkers
from raycore.parts.transfers.connectors.peers.wire import Broken
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker
from simulation.worker import complaints
from simulation.worker.users_connector import Orders
from simulation.world import kernel

_NOBODYS_FAULT = (
    "isn't what was sent",
    "an answer has",
    "a message has",
    "not a ",
    "the layout",
    "be mapped",
    "don't fit",
)
"""What reads of blocks don't fail by, whatever breaks."""
_EXPLAINED = ("the deadline has passed", "timed out", "be reached from this machine")
"""What they may fail by although all processes live."""
_GIVEN_UP = "the cache was given up"
"""What reads fail by that nobody waits for any more."""


class Reports:
    """Those of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._loads: dict[int, list[int]] = {}
        """By the seq_id of those under way: their blocks."""
        self._abandoned: set[int] = set()
        """The seq_ids of those that nobody waits for any more."""
        self._given_up: set[int] = set()
        """The seq_ids of those whose end was reported last."""
        self._names: set[str] = set()
        """Of leases."""
        self._leases: Counter[int] = Counter()
        """By seq_id: those that haven't ended."""

    def told(self, connector: WorkerConnector, metadata: bytes) -> None:
        """The connector is told this with a plan."""
        if isinstance(connector, PeersWorker):
            told = msgspec.msgpack.decode(metadata, type=ToWorkers)
            self._leases.update(each.seq_id for each in told.leases)
            for lease in told.leases:
                if lease.name in self._names:
                    self._complain(f"is told twice of lease {lease.name!r}")
                self._names.add(lease.name)
            loads = [(each.seq_id, each.blocks) for each in told.fetches]
            abandoned = told.abandoned
        elif isinstance(connector, OffloadWorker):
            told = orders_decoder.decode(metadata)
            saves = [(each.digest, each.block) for each in told.saves]
            if len(set(saves)) < len(saves):
                self._complain("is told twice to save a block")
            loads = [(job.seq_id, [each.block for each in job.sources]) for job in told.jobs]
            abandoned = told.cancelled
        else:
            orders = msgspec.msgpack.decode(metadata, type=Orders)
            self._leases.update(seq_id for seq_id, _ in orders.sends)
            loads, abandoned = [(seq_id, blocks) for seq_id, _, blocks in orders.loads], list[int]()
        for seq_id, blocks in loads:
            if seq_id in self._loads:
                self._complain(f"is told twice to load blocks of request {seq_id}")
            self._loads[seq_id] = blocks
        self._abandoned.update(abandoned)

    def unwanted(self) -> set[int]:
        """The blocks of loads under way that nobody waits for any more."""
        return {block for seq_id in self._abandoned for block in self._loads.get(seq_id, ())}

    def come(self, sent: Sequence[int], received: Sequence[int], failed_blocks: Sequence[int]) -> None:
        """The connector reports this with a step."""
        self._given_up = self._abandoned & set(received)
        self._abandoned -= self._given_up
        for seq_id in received:
            if seq_id not in self._loads:
                self._complain(f"reports the end of a load of request {seq_id}, of which none is under way")
            self._loads.pop(seq_id, None)
        for seq_id in sent:
            if not self._leases[seq_id]:
                self._complain(f"reports the end of a lease of request {seq_id}, which has none")
            self._leases[seq_id] -= 1
        if len(set(failed_blocks)) < len(failed_blocks):
            self._complain(f"reports blocks twice that weren't loaded: {list(failed_blocks)}")

    def of_reads(self, received: Sequence[int], arrived: Sequence[Arrived]) -> None:
        """The connector tells the scheduler's side this of reads."""
        if [each.seq_id for each in arrived] != list(received):
            self._complain(f"reports {list(received)}, and tells of {[each.seq_id for each in arrived]}")
        for each in arrived:
            if each.why_failed == _GIVEN_UP:
                if each.seq_id not in self._given_up:
                    self._complain(f"doesn't get blocks of another rank for request {each.seq_id}: {_GIVEN_UP}")
            elif each.why_failed and not any(text in each.why_failed for text in _EXPLAINED):
                world = kernel.the_world
                if world is not None and not any(process.has_ended for process in world.processes):
                    complaints.fails(f"{self._worker} doesn't get blocks of another rank: {each.why_failed}")

    def forget(self) -> None:
        """The cache was given up: nothing more is reported of what was under way."""
        self._loads.clear()
        self._leases.clear()
        self._abandoned.clear()

    def _complain(self, text: str) -> None:
        complaints.disagrees(f"{self._worker} {text}")


_make = Broken.__init__


def _init(self: Broken, why: str = "") -> None:
    if any(text in why for text in _NOBODYS_FAULT):
        world = kernel.the_world
        complaints.disagrees(
            f"{world and world.current} doesn't get blocks of another rank, or doesn't give any: {why}"
        )
    _make(self, why)


Broken.__init__ = _init
