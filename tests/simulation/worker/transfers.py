"""The worker's side of a KV connector, the product's own, over the simulated cache."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator, Sequence
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.messages import StepPlan, StepResult, TransferResult
from raycore.parts.transfers.connectors.connector import ConnectorSetup, WorkerConnector, connector_class
from raycore.parts.transfers.connectors.offload.files import BlockFiles
from raycore.parts.transfers.connectors.offload.worker import OffloadWorker
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker
from raycore.system import os, time
from raycore.worker.rank import WorkerRank
from simulation.worker import complaints
from simulation.worker.cache import Cache
from simulation.worker.reports import Reports
from simulation.worker.states import States
from simulation.worker.users_connector import UsersConnector
from simulation.world import descriptors, kernel
from simulation.world.kernel import pause
from simulation.world.sockets import End

FULL_UNTIL_S = "the disk is full until"
"""The name of a time in the world's systems."""
_BLOCK_PAGES = 2
"""States have another one, which fills them up to the size of a block."""
_COPY_S, _FILE_S = 2e-4, 2e-3
"""How long half a block takes, and a part of the work with a file, on average."""


class Pages:
    """A cache as `KVCaches` shows it. A copy of a block takes a while after its first half.

    So a step, or another copy, can fall between the halves. Copies of one worker's step itself take no time.
    """

    is_on_cpu = True

    def __init__(self, cache: Cache, states: States | None, layout: str) -> None:
        self.layout = layout
        self.num_blocks = cache.num_blocks
        self._pages: list[NDArray[np.uint8]] = [
            cache.layer(layer).view(np.uint8).reshape(cache.num_blocks, -1) for layer in (0, 1)
        ]
        self._states = np.zeros((0, 2, 0), np.uint8) if states is None else states.halves
        self.page_bytes = [page.shape[1] for page in self._pages]
        self.block_bytes = sum(self.page_bytes)
        self._draws = _draws("copies of blocks")
        self.num_written = 0
        """How many blocks have come from memory, of this machine or of another worker. Without states."""
        self.num_busy = 0
        """How many copies are under way."""
        self.is_given_up = False
        self.unwanted: set[int] = set()
        """Blocks of loads that nobody waits for any more, and that haven't ended."""

    def read(self, block: int, out: NDArray[np.uint8]) -> None:
        self._begin()
        for page, part in self._halves(block, out):
            part[:] = page
            self._work()
        self.num_busy -= 1

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        self.num_written += block < self.num_blocks
        self._begin(block)
        for page, part in self._halves(block, data):
            page[:] = part
            self._work()
        self.num_busy -= 1

    def read_blocks(self, blocks: Sequence[int], out: Sequence[NDArray[np.uint8]]) -> None:
        for block, target in zip(blocks, out, strict=True):
            self.read(block, target)

    def write_blocks(self, blocks: Sequence[int], data: Sequence[NDArray[np.uint8]]) -> None:
        for block, source in zip(blocks, data, strict=True):
            self.write(block, source)

    def page_views(self, block: int) -> list[memoryview]:
        self._begin(block)
        self.num_busy -= 1
        pages = self._pages_of(block)
        rest = self.block_bytes - sum(map(len, pages))
        return [page.data for page in pages] + ([np.empty(rest, np.uint8).data] if rest else [])

    def _pages_of(self, block: int) -> list[NDArray[np.uint8]]:
        """The two halves of a block, or of a state: a state has one part here."""
        if block >= self.num_blocks:
            return list(self._states[block - self.num_blocks])
        return [page[block] for page in self._pages]

    def _halves(self, block: int, data: NDArray[np.uint8]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield them with where they are in `data`."""
        start = 0
        for page in self._pages_of(block):
            yield page, data[start : start + len(page)]
            start += len(page)

    def _begin(self, written: int | None = None) -> None:
        """A copy begins. `written`: the block that is written, if any."""
        if self.is_given_up:
            complaints.disagrees("a block is copied of a cache that was given up")
        if written in self.unwanted:
            complaints.disagrees(f"block {written} is written for a request that doesn't wait for it any more")
        self.num_busy += 1

    def _work(self) -> None:
        pause()
        if self._draws.random() < 0.2:
            time.sleep(self._draws.expovariate(1 / _COPY_S))


class _SlowPath(PosixPath):
    """A file on a disk that takes its time, and with times of this world."""

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        _wait_for_disk()
        if mode == "wb" and time.monotonic() < _systems().get(FULL_UNTIL_S, 0.0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(mode, *args, **kwargs)

    def replace(self, target: Any) -> Any:
        _wait_for_disk()
        now_s = time.time()
        os.utime(self, (now_s, now_s))
        return super().replace(target)


class SlowFiles(BlockFiles):
    """Files of blocks, each of which takes a while."""

    num_read = 0
    """How many blocks have come from files. Without states."""
    first_failed_s: float | None = None
    """When a file first couldn't be written, for lack of space."""

    def write(self, digest: bytes, data: NDArray[np.uint8]) -> bool:
        is_paused = time.monotonic() < self._paused_until_s
        is_written = super().write(digest, data)
        if time.monotonic() < self._paused_until_s and not is_paused and self.first_failed_s is None:
            self.first_failed_s = time.monotonic()
        return is_written

    def path(self, digest: bytes) -> Path:
        return _SlowPath(super().path(digest))

    def read(self, digest: bytes, pages: Sequence[memoryview]) -> bool:
        is_right = super().read(digest, pages)
        if is_right:
            self.num_read += len(pages) == _BLOCK_PAGES
            now_s = time.time()
            os.utime(super().path(digest), (now_s, now_s))
        _wait_for_disk()
        return is_right


class Transfers:
    """Calls a connector's hooks around each step."""

    def __init__(self, config: EngineConfig, cache: KVCacheConfig, rank: WorkerRank) -> None:
        setup = ConnectorSetup(config, cache, rank.dp_rank, rank.world_size, rank.worker)
        self.is_first = not rank.worker
        """Whether it is that of the first of a rank's workers."""
        self.num_failed = 0
        """How many blocks it couldn't load."""
        self._pages: list[Pages] = []
        """The caches that it was given, one after the other."""
        self._reports = Reports(rank.label)
        self._layout = f"simulated, block_size={config.cache.block_size}, worker={rank.worker} of {rank.world_size}"
        self._connector: WorkerConnector = connector_class(config).worker_side(setup)
        assert not self._connector.has_layer_hooks, "the simulated worker has no hooks in layers"
        world = kernel.the_world
        assert world is not None, "connectors are for engines in a world"
        self.process = None if world.current is None else world.current.process
        if self.process is not None:
            transfers_of(world).append((self.process, self))
        if isinstance(self._connector, OffloadWorker):
            vars(self._connector)["files_class"] = SlowFiles  # of this one only: others may be outside of any world

    def register(self, cache: Cache, states: States | None) -> None:
        if isinstance(self._connector, PeersWorker) and (lent := len(self._connector._held)):
            complaints.disagrees(f"others may read {lent} blocks of a cache that has just been allocated")
        pages: Any = Pages(cache, states, self._layout)
        self._pages.append(pages)
        self._connector.register_kv_caches(pages)

    def release(self) -> None:
        connector = self._connector
        connector.release_kv_caches()
        self._reports.forget()
        for each in self._pages[-1:]:
            if each.num_busy:
                complaints.disagrees(f"{each.num_busy} blocks are copied of a cache that was given up")
            each.is_given_up = True
        if isinstance(connector, PeersWorker):
            for what, left in {**self.lent(), "fetches": connector._jobs}.items():
                if left:
                    complaints.disagrees(f"the cache was given up, and {what} are left: {left}")

    def begin(self, plan: StepPlan) -> None:
        if plan.transfer is not None:
            self._reports.told(self._connector, plan.transfer)
            self._connector.bind_connector_metadata(plan.transfer)
        self._connector.start_load_kv(plan)
        self._pages[-1].unwanted = self._reports.unwanted()

    def report(self) -> TransferResult | None:
        """Save what the step has changed. Returns what there is to report."""
        connector = self._connector
        connector.wait_for_save()
        sent, received = connector.get_finished()
        failed_blocks = connector.get_block_ids_with_load_errors()
        self._reports.come(sent, received, failed_blocks)
        self._pages[-1].unwanted = self._reports.unwanted()
        if isinstance(connector, PeersWorker):
            self._reports.of_reads(received, connector._arrived)
        self.num_failed += len(failed_blocks)
        reply = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        if not (sent or received or failed_blocks) and reply is None:
            return None
        return TransferResult(list(sent), list(received), list(failed_blocks), [] if reply is None else [reply])

    def handshake(self) -> bytes | None:
        return self._connector.get_handshake_metadata()

    def shutdown(self) -> None:
        self._connector.shutdown()
        world = kernel.the_world
        for each in descriptors.all_open() if world is not None and world.current is not None else ():
            is_own = isinstance(each, End) and each.process is world.current.process
            if is_own and getattr(each.socket, "listens", False):
                complaints.disagrees(f"{each.process} has shut its connector down, and still listens for others")

    def leases(self) -> Iterator[tuple[str, object]]:
        """What is kept for others until they have read it, or for a while."""
        yield "leases", self.lent().get("leases")

    def lent(self) -> dict[str, Any]:
        """What other workers may read or give back."""
        connector = self._connector
        if not isinstance(connector, PeersWorker):
            return {}
        held = {digest: each.block for digest, each in connector._held._held.items()}
        return {"leases": connector._leases._leases, "blocks that others may read": held}

    def _connected(self) -> list[Any]:
        """The sockets by which this worker has connected to others."""
        own = [each.socket for each in descriptors.all_open() if isinstance(each, End) and each.process is self.process]
        return [each for each in own if each._is_connected]

    def num_loaded(self) -> Iterator[tuple[str, int]]:
        """How many blocks were written into the cache, by where they were."""
        num_written = sum(each.num_written for each in self._pages)
        if isinstance(self._connector, OffloadWorker):
            yield "host", num_written
            yield "disk", getattr(self._connector._files, "num_read", 0)
        elif isinstance(self._connector, PeersWorker):
            yield "p2p", num_written

    def under_way(self) -> Iterator[tuple[str, object]]:
        """What there is of transfers, each with its name: empty, or 0, if nobody waits for any."""
        connector = self._connector
        if isinstance(connector, PeersWorker):
            yield "fetches", connector._jobs
            if connector._reader is not None and connector._server is not None:
                yield "fetches of its reader", connector._reader._unfinished
                gone = [each for each in connector._server._readers if each._number is None]  # pyright: ignore[reportAttributeAccessIssue]
                yield "readers that are gone", gone
                kept = [connection._socket for _, connection in connector._reader._idle]
                yield "connections that nobody keeps", [each for each in self._connected() if each not in kept]
        elif isinstance(connector, OffloadWorker):
            reader, writer = connector._reader, connector._writer
            yield "loads", [] if reader is None else reader._unfinished
            yield "bytes to be written", 0 if writer is None else writer._num_waiting_bytes
            yield "removals of all files", 0 if writer is None else writer._num_clears
        elif isinstance(connector, UsersConnector):
            yield "loads", connector.loads
            yield "blocks that are kept", connector.sends


def transfers_of(world: kernel.World) -> list[tuple[kernel.Process, Transfers]]:
    """Those of all workers, with their processes."""
    return world.systems.setdefault("transfers", [])


def with_report(plan: StepPlan, own: StepResult | None, report: TransferResult | None) -> StepResult | None:
    """What a worker returns of a step."""
    if report is None:
        return own
    result = own or StepResult(plan.step)
    result.transfer = report
    return result


def _systems() -> dict[str, Any]:
    assert kernel.the_world is not None, "connectors are for engines in a world"
    return kernel.the_world.systems


def _draws(purpose: str) -> random.Random:
    assert kernel.the_world is not None, "connectors are for engines in a world"
    return kernel.the_world.systems.setdefault(purpose, kernel.the_world.generator(purpose))


def _wait_for_disk() -> None:
    time.sleep(_draws("disks").expovariate(1 / _FILE_S))
