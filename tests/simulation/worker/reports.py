"""What a worker's side of a connector reports: each load and lease once, and reads that fail only for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from raycore.kv_transfer.connector import WorkerConnector
from raycore.kv_transfer.offload.orders import orders_decoder
from raycore.kv_transfer.offload.worker import OffloadWorker
from raycore.kv_transfer.peers.notes import Arrived, ToWorkers
from raycore.kv_transfer.peers.worker_side import PeersWorker
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
_EXPLAINED = ("the deadline has passed", "timed out", "the cache was given up", "be reached from this machine")
"""What they may fail by although all processes live."""


class Reports:
    """Those of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._loads: set[int] = set()
        """The seq_ids of those under way."""
        self._leases: Counter[int] = Counter()
        """By seq_id: those that haven't ended."""

    def told(self, connector: WorkerConnector, metadata: bytes) -> None:
        """The connector is told this with a plan."""
        if isinstance(connector, PeersWorker):
            told = msgspec.msgpack.decode(metadata, type=ToWorkers)
            self._leases.update(each.seq_id for each in told.leases)
            loads = [each.seq_id for each in told.fetches]
        elif isinstance(connector, OffloadWorker):
            loads = [each.seq_id for each in orders_decoder.decode(metadata).jobs]
        else:
            orders = msgspec.msgpack.decode(metadata, type=Orders)
            self._leases.update(seq_id for seq_id, _ in orders.sends)
            loads = [seq_id for seq_id, _, _ in orders.loads]
        for seq_id in loads:
            if seq_id in self._loads:
                self._complain(f"is told twice to load blocks of request {seq_id}")
            self._loads.add(seq_id)

    def come(self, sent: Sequence[int], received: Sequence[int], failed_blocks: Sequence[int]) -> None:
        """The connector reports this with a step."""
        for seq_id in received:
            if seq_id not in self._loads:
                self._complain(f"reports the end of a load of request {seq_id}, of which none is under way")
            self._loads.discard(seq_id)
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
            if any(text in each.why_failed for text in _NOBODYS_FAULT):
                self._complain(f"doesn't get blocks of another rank: {each.why_failed}")
            elif each.why_failed and not any(text in each.why_failed for text in _EXPLAINED):
                world = kernel.the_world
                if world is not None and not any(process.has_ended for process in world.processes):
                    complaints.fails(f"{self._worker} doesn't get blocks of another rank: {each.why_failed}")

    def forget(self) -> None:
        """The cache was given up: nothing more is reported of what was under way."""
        self._loads.clear()
        self._leases.clear()

    def _complain(self, text: str) -> None:
        complaints.disagrees(f"{self._worker} {text}")
