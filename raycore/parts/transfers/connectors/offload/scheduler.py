"""The scheduler's side of the offload connector: which blocks are where, and what is copied when.

All workers of a rank have equally many slots in the host's memory, and do the same with them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from raycore.messages import StepPlan, TransferResult
from raycore.parts.transfers.connectors.connector import ConnectorSetup, SchedulerConnector, TransferRequest
from raycore.parts.transfers.connectors.cost import CostModel
from raycore.parts.transfers.connectors.events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from raycore.parts.transfers.connectors.offload.files import path_of
from raycore.parts.transfers.connectors.offload.orders import (
    NOWHERE,
    BlockSource,
    LoadJob,
    LoadReport,
    Orders,
    Save,
    WorkerHello,
    hello_decoder,
    orders_encoder,
    report_decoder,
)
from raycore.parts.transfers.connectors.offload.settings import OffloadSettings

_MAX_SAVES_PER_STEP = 256
"""Copies delay the step. What is stored faster than that isn't kept."""
_PROBE_EVERY = 32
"""So often a load that shouldn't pay is done all the same, because what was measured may no longer be true."""


class _Found(NamedTuple):
    """What could be loaded for a request."""

    first: int
    """The index of its first block."""
    slots: list[int]
    """By block: where it is in the host's memory, or `NOWHERE`: in a file."""


class OffloadScheduler(SchedulerConnector):
    """See the module."""

    def __init__(self, setup: ConnectorSetup, settings: OffloadSettings) -> None:
        transfer = setup.config.kv_transfer_config
        assert transfer is not None, "there is a connector"
        self._settings = settings
        self._saves_blocks, self._loads_blocks = transfer.is_producer, transfer.is_consumer
        self._block_size = setup.config.tokens_per_block
        self._num_workers = setup.num_workers
        self._makes_events = setup.config.kv_events_config is not None
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        """Blocks in the host's memory, the least recently used first."""
        self._free: list[int] = []
        self._directories: list[Path] = []
        """By worker: where its files are."""
        self._cost = CostModel(0, self._block_size)
        self._found: dict[int, _Found] = {}
        """By seq_id: what was offered last."""
        self._orders = Orders()
        self._pinned: Counter[int] = Counter()
        """Slots that are read by what the next plan loads, or by jobs. They keep their blocks."""
        self._forgotten: set[int] = set()
        """Pinned slots whose blocks nobody may load any more."""
        self._loading_slots: list[int] = []
        """Those of the next plan's loads."""
        self._job_slots: dict[int, list[int]] = {}
        """By seq_id: those of its job."""
        self._taken: dict[int, list[int]] = {}
        """By seq_id: where the blocks were that it has taken, as in `_Found`."""
        self._num_clearing = 0
        """Number of workers that haven't removed their files yet."""
        self._num_declined = 0
        self._events: list[KVCacheEvent] = []

    def set_xfer_handshake_metadata(self, metadata: dict[int, bytes]) -> None:
        """Take in the sizes of the workers' blocks and memories."""
        hellos: list[WorkerHello] = [hello_decoder.decode(data) for data in metadata.values()]
        self._free = list(range(min(hello.num_slots for hello in hellos)))[::-1]
        self._directories = [Path(hello.directory) for hello in hellos if hello.directory is not None]
        self._cost = CostModel(max(hello.block_bytes for hello in hellos), self._block_size)

    # ---- loads

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._loads_blocks:
            return 0, False
        first = num_computed_tokens // self._block_size
        slots: list[int] = []
        for digest in request.digests[first:]:
            slot = self._slot_of.get(digest)
            if slot is None:
                if not self._is_in_files(digest):
                    break
                slot = NOWHERE
            slots.append(slot)
        if not slots or not self._pays(slots):
            return 0, False
        self._found[request.seq_id] = _Found(first, slots)
        return len(slots) * self._block_size, NOWHERE in slots

    def _pays(self, slots: Sequence[int]) -> bool:
        num_in_files = sum(slot == NOWHERE for slot in slots)
        took_s = 0.0
        if num_in_files:
            took_s += self._cost.fetch_s(num_in_files, is_local=False)
        if num_in_files < len(slots):
            took_s += self._cost.fetch_s(len(slots) - num_in_files, is_local=True)
        if self._settings.always_load or took_s < self._cost.compute_s(len(slots)):
            return True
        self._num_declined += 1
        return self._num_declined % _PROBE_EVERY == 0

    def _is_in_files(self, digest: bytes) -> bool:
        if not self._directories or self._num_clearing:
            return False
        return all(path_of(directory, digest).exists() for directory in self._directories)

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        first, slots = self._found.pop(request.seq_id)
        num_blocks = num_external_tokens // self._block_size
        self._taken[request.seq_id] = slots[:num_blocks]
        sources: list[BlockSource] = []
        for index, slot in enumerate(slots[:num_blocks], first):
            digest = request.digests[index]
            if slot != NOWHERE:
                self._pinned[slot] += 1
                self._slot_of.move_to_end(digest)
            sources.append(BlockSource(block_ids[index], slot, b"" if slot != NOWHERE else digest))
        used = [source.slot for source in sources if source.slot != NOWHERE]
        if NOWHERE in slots:
            self._orders.jobs.append(LoadJob(request.seq_id, sources))
            self._job_slots[request.seq_id] = used
        else:
            self._orders.loads += sources
            self._loading_slots += used

    def get_external_cache_hit_sources(self, request: TransferRequest, num_external_tokens: int) -> dict[str, int]:
        blocks = self._taken.pop(request.seq_id, [])[: num_external_tokens // self._block_size]
        num_on_disk = blocks.count(NOWHERE) * self._block_size
        return {"host": len(blocks) * self._block_size - num_on_disk, "disk": num_on_disk}

    def load_abandoned(self, request: TransferRequest) -> None:
        self._orders.cancelled.append(request.seq_id)

    def request_finished(self, request: TransferRequest, block_ids: Sequence[int]) -> tuple[bool, None]:
        self._found.pop(request.seq_id, None)
        self._taken.pop(request.seq_id, None)
        return False, None

    # ---- saves

    def blocks_stored(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int
    ) -> None:
        if not self._saves_blocks:
            return
        for digest, block in zip(digests, block_ids, strict=True):
            if len(self._orders.saves) >= _MAX_SAVES_PER_STEP:
                return
            is_in_memory = digest in self._slot_of
            if is_in_memory:
                self._slot_of.move_to_end(digest)
            slot = NOWHERE if is_in_memory else self._take_slot(digest)
            to_file = bool(self._directories) and not self._num_clearing and not self._is_in_files(digest)
            if slot != NOWHERE or to_file:
                self._orders.saves.append(Save(digest, block, slot, to_file))
            if slot != NOWHERE and self._makes_events:
                parent = request.digests[first - 1] if first else None
                self._events.append(BlockStored([digest], parent, [], self._block_size, None, MEDIUM_CPU, None))
            first += 1

    def _take_slot(self, digest: bytes) -> int:
        """Return a slot for a block, in which the least recently used block may have been; or `NOWHERE`."""
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((each for each, slot in self._slot_of.items() if not self._pinned[slot]), None)
            if oldest is None:
                return NOWHERE
            slot = self._forget(oldest)
        self._slot_of[digest] = slot
        return slot

    def _unpin(self, slots: Iterable[int]) -> None:
        self._pinned.subtract(slots)
        unused = {slot for slot in self._forgotten if self._pinned[slot] <= 0}
        self._forgotten -= unused
        self._free += unused

    def _forget(self, digest: bytes) -> int:
        if self._makes_events:
            self._events.append(BlockRemoved([digest], MEDIUM_CPU))
        return self._slot_of.pop(digest)

    def cache_lost(self) -> None:
        # what hasn't been copied isn't in the host's memory after all
        for save in self._orders.saves:
            if save.slot != NOWHERE and save.digest in self._slot_of:  # a later one may have taken its slot
                self._free.append(self._forget(save.digest))
        clears = self._orders.clears_files
        self._orders = Orders(clears_files=clears)
        self._pinned.clear()
        self._unpin(())
        self._job_slots.clear()
        self._loading_slots.clear()

    # ---- steps

    def build_connector_meta(self, plan: StepPlan) -> bytes | None:
        orders, self._orders = self._orders, Orders()
        self._unpin(self._loading_slots)
        self._loading_slots.clear()
        if orders.saves or orders.loads or orders.jobs or orders.cancelled or orders.clears_files:
            return orders_encoder.encode(orders)
        return None

    def has_pending_push_work(self) -> bool:
        return bool(self._orders.saves or self._orders.cancelled or self._num_clearing)

    def update_connector_output(self, result: TransferResult) -> None:
        for seq_id in result.received:
            self._unpin(self._job_slots.pop(seq_id, ()))
        for reply in result.reply:
            report: LoadReport = report_decoder.decode(reply)
            self._cost.observe_fetch(report.host_bytes, report.host_s, is_local=True)
            self._cost.observe_fetch(report.file_bytes, report.file_s, is_local=False)
            self._num_clearing -= report.num_cleared

    def observe_step(self, num_tokens: int, duration_s: float) -> None:
        self._cost.observe_step(num_tokens, duration_s)

    # ---- all else

    def take_events(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def take_identity(self, identity: bytes) -> None:
        """Give up the host's memory, which only has blocks of other weights. Files may be of use to others."""
        self._forget_all()

    def _forget_all(self) -> None:
        self._orders.saves.clear()
        self._forgotten |= {self._forget(digest) for digest in list(self._slot_of)}
        self._unpin(())

    def reset_cache(self) -> bool:
        """Forget the host's memory at once, and have the workers remove their files."""
        self._forget_all()
        if self._directories and not self._orders.clears_files:
            self._orders.clears_files = True
            self._num_clearing += self._num_workers
        return True
