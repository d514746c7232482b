"""The worker's side of the offload connector: copies blocks, and reads and writes files on two threads."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from raycore.messages import StepPlan
from raycore.parts.transfers.connectors.connector import ConnectorSetup, WorkerConnector
from raycore.parts.transfers.connectors.host_pool import HostPool
from raycore.parts.transfers.connectors.offload.files import BlockFiles
from raycore.parts.transfers.connectors.offload.orders import (
    NOWHERE,
    LoadJob,
    LoadReport,
    Orders,
    Save,
    WorkerHello,
    orders_decoder,
)
from raycore.parts.transfers.connectors.offload.settings import OffloadSettings
from raycore.system import queue, threading, time

if TYPE_CHECKING:
    from raycore.parts.transfers.connectors.worker_side.caches import KVCaches

logger = logging.getLogger(__name__)

_MAX_UNWRITTEN_BYTES = 64 << 20
"""Copies that wait to be written to files. What comes when there are so many isn't written."""
_JOIN_S = 5.0


@dataclass(eq=False)
class _RunningJob:
    job: LoadJob
    deadline_s: float
    is_cancelled: bool = False
    failed_blocks: list[int] = field(default_factory=list[int])
    num_file_bytes: int = 0
    num_host_bytes: int = 0
    took_s: float = 0.0


class OffloadWorker(WorkerConnector):
    """See the module."""

    files_class: ClassVar[type[BlockFiles]] = BlockFiles

    def __init__(self, setup: ConnectorSetup, settings: OffloadSettings) -> None:
        self._setup = setup
        self._settings = settings
        self._caches: KVCaches | None = None
        self._pool: HostPool | None = None
        self._files: BlockFiles | None = None
        self._reader: _Reader | None = None
        self._writer: _Writer | None = None
        self._report = LoadReport()
        self._received: list[int] = []
        self._failed_blocks: list[int] = []

    def register_kv_caches(self, caches: KVCaches) -> None:
        """See `WorkerConnector`.

        Raises:
            InvalidConfig: the directory can't be written, or there isn't so much memory.
        """
        is_first, self._caches = self._pool is None, caches
        if self._reader is not None:
            self._reader.resume(caches)
        if is_first:
            self._begin(caches)

    def _begin(self, caches: KVCaches) -> None:
        num_bytes = self._settings.cpu_bytes_to_use // self._setup.num_workers
        pool = self._pool = HostPool(num_bytes // caches.block_bytes, caches.block_bytes)
        if self._settings.path is not None:
            path = Path(self._settings.path).expanduser().absolute()
            files = self._files = self.files_class(path, caches.layout, caches.block_bytes, self._settings.disk_bytes)
            files.check()
            self._writer = _Writer(files)
        self._reader = _Reader(self._files, pool, caches)

    def release_kv_caches(self) -> None:
        if self._reader is not None:
            self._reader.release()
        self._caches = None
        self._received.clear()
        self._failed_blocks.clear()

    def get_handshake_metadata(self) -> bytes:
        assert self._caches is not None
        assert self._pool is not None
        directory = None if self._files is None else str(self._files.directory)
        return msgspec.msgpack.encode(WorkerHello(self._caches.block_bytes, len(self._pool.blocks), directory))

    def start_load_kv(self, plan: StepPlan) -> None:
        if self.metadata is None:
            return
        orders: Orders = orders_decoder.decode(self.metadata)
        if orders.clears_files and self._writer is not None:
            self._writer.clear()
        self._save(orders.saves)
        self._load(orders)
        if self._reader is not None:
            deadline_s = time.monotonic() + self._settings.load_timeout_s
            for job in orders.jobs:
                self._reader.start(_RunningJob(job, deadline_s))
            self._reader.cancel(orders.cancelled)

    def _save(self, saves: list[Save]) -> None:
        if not saves:
            return
        caches, pool = self._caches, self._pool
        assert caches is not None
        assert pool is not None
        # a block that goes only into a file is copied, too: steps may overwrite it before it is written
        copies: list[NDArray[np.uint8]] = []
        last_of = {save.slot: save for save in saves}
        for save in saves:
            # if blocks take each other's slot in one step, the slot is the last one's, and files get all
            is_in_memory = save.slot != NOWHERE and last_of[save.slot] is save
            copies.append(pool.blocks[save.slot] if is_in_memory else np.empty(caches.block_bytes, np.uint8))
        caches.read_blocks([save.block for save in saves], copies)
        if self._writer is not None:
            for save, data in zip(saves, copies, strict=True):
                if save.to_file and self._writer.has_room(len(data)):
                    self._writer.write(save.digest, data if save.slot == NOWHERE else np.array(data))

    def _load(self, orders: Orders) -> None:
        if not orders.loads:
            return
        caches, pool, started_s = self._caches, self._pool, time.perf_counter()
        assert caches is not None
        assert pool is not None
        caches.write_blocks(
            [source.block for source in orders.loads], [pool.blocks[source.slot] for source in orders.loads]
        )
        self._report.host_bytes += len(orders.loads) * caches.block_bytes
        self._report.host_s += time.perf_counter() - started_s

    def get_finished(self) -> tuple[list[int], list[int]]:
        if self._reader is None:
            return [], []
        done = self._reader.take_done()
        for each in done:
            self._failed_blocks += each.failed_blocks
            if each.failed_blocks:
                continue
            if each.num_file_bytes:
                self._report.file_bytes += each.num_file_bytes
                self._report.file_s += each.took_s
            else:
                self._report.host_bytes += each.num_host_bytes
                self._report.host_s += each.took_s
        return [], [each.job.seq_id for each in done]

    def get_block_ids_with_load_errors(self) -> list[int]:
        failed, self._failed_blocks = self._failed_blocks, []
        return failed

    def build_connector_worker_meta(self) -> bytes | None:
        if self._writer is not None:
            self._report.num_cleared = self._writer.take_num_cleared()
        if self._report == LoadReport():
            return None
        report, self._report = self._report, LoadReport()
        return msgspec.msgpack.encode(report)

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = self._caches = self._pool = None


class _Writer:
    """Writes files on a thread, in the order in which blocks come."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self._queue: queue.SimpleQueue[tuple[bytes, NDArray[np.uint8]] | Literal["clear", "end"]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting_bytes = 0
        self._num_clears = 0
        """Number of times that files are still to be removed. What comes before that isn't written."""
        self._num_cleared = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Whether a copy may wait."""
        return self._num_waiting_bytes == 0 or self._num_waiting_bytes + num_bytes <= _MAX_UNWRITTEN_BYTES

    def write(self, digest: bytes, data: NDArray[np.uint8]) -> None:
        """Write a block soon. Nobody changes `data` any more."""
        with self._lock:
            self._num_waiting_bytes += len(data)
        self._put((digest, data))

    def clear(self) -> None:
        """Write nothing that waits, and remove all files."""
        with self._lock:
            self._num_clears += 1
        self._put("clear")

    def take_num_cleared(self) -> int:
        """Return how many times the files have been removed since the last call."""
        if not self._num_cleared:
            return 0
        with self._lock:
            number, self._num_cleared = self._num_cleared, 0
        return number

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and end. Idempotent."""
        if self._thread is not None:
            self._queue.put("end")
            self._thread.join(_JOIN_S)
            self._is_closed = True

    def _put(self, entry: tuple[bytes, NDArray[np.uint8]] | Literal["clear"]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raycore-kv-write", daemon=True)
            self._thread.start()
        self._queue.put(entry)

    def _run(self) -> None:
        while (entry := self._queue.get()) != "end" and not self._is_closed:
            if entry == "clear":
                self._files.clear()
                with self._lock:
                    self._num_clears -= 1
                    self._num_cleared += 1
                continue
            digest, data = entry
            if not self._num_clears:
                self._files.write(digest, data)
            with self._lock:
                self._num_waiting_bytes -= len(data)


class _Reader:
    """Loads the blocks of jobs on a thread, job after job."""

    def __init__(self, files: BlockFiles | None, pool: HostPool, caches: KVCaches) -> None:
        """`files`: None: jobs load from the host's memory only."""
        self._files = files
        self._pool = pool
        self._caches: KVCaches | None = caches
        self._queue: queue.SimpleQueue[_RunningJob | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        """Held while a block is loaded, so that `release` returns only when none is."""
        self._unfinished: list[_RunningJob] = []
        self._done: deque[_RunningJob] = deque()
        self._thread: threading.Thread | None = None

    def start(self, running: _RunningJob) -> None:
        """Start a job."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="raycore-kv-read", daemon=True)
            self._thread.start()
        self._unfinished.append(running)
        self._queue.put(running)

    def cancel(self, seq_ids: list[int]) -> None:
        """Let jobs end soon."""
        for running in self._unfinished:
            if running.job.seq_id in seq_ids:
                running.is_cancelled = True

    def take_done(self) -> list[_RunningJob]:
        """Return the jobs that have ended since the last call."""
        done: list[_RunningJob] = []
        while self._done:
            done.append(self._done.popleft())
            self._unfinished.remove(done[-1])
        return done

    def release(self) -> None:
        """Load nothing more. When this returns, no block is written, and no job will be reported."""
        with self._writing:
            self._caches = None
        for running in self._unfinished:
            running.is_cancelled = True
        self._unfinished, self._done = [], deque()

    def resume(self, caches: KVCaches) -> None:
        """Load again, into a cache that was allocated again."""
        with self._writing:
            self._caches = caches

    def close(self) -> None:
        """End. Idempotent."""
        self.release()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (running := self._queue.get()) is not None:
            done, started_s = self._done, time.perf_counter()
            for index, source in enumerate(running.job.sources):
                try:
                    is_right = self._load(running, source.block, source.slot, source.digest)
                except Exception:  # the request is computed then, and other jobs go on
                    logger.exception("a block of the KV cache couldn't be loaded")
                    is_right = False
                if not is_right:
                    # what follows a block that is missing is of no use
                    running.failed_blocks = [each.block for each in running.job.sources[index:]]
                    break
            running.took_s = time.perf_counter() - started_s
            if running in self._unfinished:
                done.append(running)

    def _load(self, running: _RunningJob, block: int, slot: int, digest: bytes) -> bool:
        """Load a block. Returns whether it has its content now."""
        with self._writing:
            caches = self._caches
            if caches is None or running.is_cancelled or time.monotonic() > running.deadline_s:
                return False
            if slot != NOWHERE:
                caches.write_blocks([block], [self._pool.blocks[slot]])
                running.num_host_bytes += caches.block_bytes
                return True
            assert self._files is not None
            running.num_file_bytes += caches.block_bytes
            if caches.is_on_cpu:
                return self._files.read(digest, caches.page_views(block))
            data = np.empty(caches.block_bytes, np.uint8)
            if not self._files.read(digest, [data.data]):
                return False
            caches.write_blocks([block], [data])
            return True
