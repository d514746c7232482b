"""The worker's side: lets workers of other ranks read its blocks, and reads theirs. Does not import torch."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from raycore.messages import StepPlan
from raycore.parts.transfers.connectors.connector import WorkerConnector
from raycore.parts.transfers.connectors.peers.blocks import HeldBlocks
from raycore.parts.transfers.connectors.peers.hints import address_text, parse_address
from raycore.parts.transfers.connectors.peers.notes import (
    Arrived,
    Fetch,
    Lease,
    ToScheduler,
    ToWorkers,
    WorkerInfo,
    split,
)
from raycore.parts.transfers.connectors.peers.reader import BlockReader, FetchJob
from raycore.parts.transfers.connectors.peers.server import BlockServer
from raycore.parts.transfers.connectors.peers.settings import PeersSettings
from raycore.system import threading, time

if TYPE_CHECKING:
    from raycore.parts.transfers.connectors.worker_side.caches import KVCaches


_MAX_EARLY = 256


class Leases:
    """The blocks that are kept for others. Readers end a lease on other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, tuple[int, float]] = {}
        """By name: the seq_id of the request, and when the lease ends at the latest."""
        self._early: deque[str] = deque(maxlen=_MAX_EARLY)
        """Names that were released before their leases came."""
        self._ended: list[int] = []

    def add(self, leases: Sequence[Lease]) -> None:
        """Keep blocks."""
        now_s = time.monotonic()
        with self._lock:
            for lease in leases:
                if lease.name in self._early:
                    self._ended.append(lease.seq_id)
                else:
                    self._leases[lease.name] = lease.seq_id, now_s + lease.timeout_s

    def release(self, names: Sequence[str]) -> None:
        """End leases, also those that are still to come."""
        with self._lock:
            for name in names:
                found = self._leases.pop(name, None)
                if found is not None:
                    self._ended.append(found[0])
                else:
                    self._early.append(name)

    def take_ended(self) -> list[int]:
        """Return the seq_ids of the requests whose leases have ended since the last call."""
        if not (self._leases or self._ended):
            return []
        now_s = time.monotonic()
        with self._lock:
            for name in [name for name, (_, end_s) in self._leases.items() if end_s <= now_s]:
                self._ended.append(self._leases.pop(name)[0])
            ended, self._ended = self._ended, []
        return ended

    def clear(self) -> None:
        """Forget all leases, because the cache was given up."""
        with self._lock:
            self._leases.clear()
            self._ended.clear()


class PeersWorker(WorkerConnector):
    """One worker's side, of both connectors."""

    server_class: type[BlockServer] = BlockServer

    def __init__(self, settings: PeersSettings, worker: int) -> None:
        """`worker`: this worker's number among those of its rank."""
        self._settings = settings
        self._worker = worker
        self._held = HeldBlocks()
        self._leases = Leases()
        self._server: BlockServer | None = None
        self._reader: BlockReader | None = None
        self._block_bytes = 0
        self._numbers = itertools.count()
        self._jobs: dict[int, int] = {}
        """The seq_ids of fetches under way, by the job's number. Those from before the cache was given up aren't here.
        """
        self._failed: list[int] = []
        self.counts = Counter[str]()
        """Since the start: `fetches`, and the `read` and `failed` blocks of all of them."""
        self._arrived: list[Arrived] = []

    def register_kv_caches(self, caches: KVCaches) -> None:
        self._block_bytes = caches.block_bytes
        if self._server is None or self._reader is None:
            host = self._settings.host
            self._server = self.server_class(caches, self._held, self._leases.release, host)
            self._reader = BlockReader(caches, self._settings.num_threads)
        else:
            self._server.resume(caches)
            self._reader.resume(caches)

    def release_kv_caches(self) -> None:
        self._held.clear()
        self._leases.clear()
        self._jobs.clear()
        if self._server is not None and self._reader is not None:
            self._server.release()
            self._reader.release()

    # ---- steps

    def bind_connector_metadata(self, metadata: bytes) -> None:
        told = msgspec.msgpack.decode(metadata, type=ToWorkers)
        if told.is_cleared:
            self._held.clear()
        if told.removed:
            self._held.remove(split(told.removed))
        if told.stored:
            self._held.add(split(told.stored), told.stored_blocks)
        if told.leases:
            self._leases.add(told.leases)
        for seq_id in told.abandoned:
            self._cancel(seq_id)
        for fetch in told.fetches:
            self._jobs[self._start(fetch)] = fetch.seq_id
        for fetch in told.releases:
            self._start(fetch)

    def start_load_kv(self, plan: StepPlan) -> None:
        """Does nothing: what is fetched was started with the metadata."""

    def _start(self, fetch: Fetch) -> int:
        """Start a job, and return its number."""
        assert self._reader is not None, "register_kv_caches() comes first"
        number = next(self._numbers)
        address = parse_address(fetch.workers[self._worker])
        deadline_s = time.monotonic() + fetch.timeout_s
        self._reader.start(FetchJob(number, address, list(split(fetch.digests)), fetch.blocks, deadline_s, fetch.lease))
        return number

    def _cancel(self, seq_id: int) -> None:
        for number, other in self._jobs.items():
            if other == seq_id and self._reader is not None:
                self._reader.cancel(number)

    def get_finished(self) -> tuple[list[int], list[int]]:
        received: list[int] = []
        for done in self._reader.take_done() if self._reader is not None else ():
            seq_id = self._jobs.pop(done.key, None)
            if seq_id is None:
                continue
            received.append(seq_id)
            self._failed += done.failed_blocks
            num_failed = len(done.failed_blocks)
            self.counts.update(fetches=1, read=done.num_bytes // self._block_bytes, failed=num_failed)
            arrived = Arrived(seq_id, done.num_bytes, done.took_s, done.is_local, num_failed, done.why_failed)
            self._arrived.append(arrived)
        return self._leases.take_ended(), received

    def get_block_ids_with_load_errors(self) -> list[int]:
        failed, self._failed = self._failed, []
        return failed

    def build_connector_worker_meta(self) -> bytes | None:
        if not self._arrived:
            return None
        arrived, self._arrived = self._arrived, []
        return msgspec.msgpack.encode(ToScheduler(arrived))

    def get_handshake_metadata(self) -> bytes | None:
        assert self._server is not None, "register_kv_caches() comes first"
        return msgspec.msgpack.encode(WorkerInfo(address_text(self._server.address), self._block_bytes))

    def shutdown(self) -> None:
        if self._server is not None and self._reader is not None:
            self._server.close()
            self._reader.close()
