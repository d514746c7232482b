"""The scheduler's side of the offload connector: which blocks are where, and what is copied when.

All workers of a rank have equally many slots in the host's memory, and do the same with them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raycore.messages import StepPlan, TransferResult
from raycore.parts.transfers.connectors.connector import BlockIds, ConnectorSetup, TransferRequest
from raycore.parts.transfers.connectors.cost import CostModel
from raycore.parts.transfers.connectors.events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from raycore.parts.transfers.connectors.groups import GroupBlocks, GroupedConnector, block_name
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
    """A block that could be loaded for a request."""

    group: int
    place: int
    """Its index among the request's blocks of the group."""
    name: bytes
    slot: int
    """Where it is in the host's memory, or `NOWHERE`: in a file."""


class OffloadScheduler(GroupedConnector):
    """See the module."""

    def __init__(self, setup: ConnectorSetup, settings: OffloadSettings) -> None:
        transfer = setup.config.kv_transfer_config
        assert transfer is not None, "there is a connector"
        self._settings = settings
        self._saves_blocks, self._loads_blocks = transfer.is_producer, transfer.is_consumer
        self._block_size = setup.config.tokens_per_block
        self._num_workers = setup.num_workers
        self._makes_events = setup.config.kv_events_config is not None
        layout = setup.cache.layout
        self._groups = GroupBlocks.of(setup.cache, self._block_size)
        self._num_groups = layout.num_groups
        """Without those that are parts of states."""
        self._has_states = setup.cache.num_state_parts > 0
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        """Blocks in the host's memory, by `block_name`, the least recently used first."""
        self._told: dict[bytes, tuple[bytes, int]] = {}
        """Digests and groups of those of them that events have told of."""
        self._free: list[int] = []
        self._directories: list[Path] = []
        """By worker: where its files are."""
        self._cost = CostModel(0, self._block_size)
        self._found: dict[int, list[_Found]] = {}
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
        self._taken: dict[int, list[bool]] = {}
        """By seq_id: of the blocks of tokens that it has taken, whether they were in files."""
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
        first, end = num_computed_tokens // self._block_size, (len(request.tokens) - 1) // self._block_size
        slot_of: dict[tuple[int, int], int] = {}

        def has(group: int, place: int) -> bool:
            slot = self._place_of(block_name(request.digests[place], group))
            if slot is not None:
                slot_of[group, place] = slot
            return slot is not None

        num_blocks = self._groups.longest(first, min(end, len(request.digests)), has)
        found = [
            _Found(group, place, block_name(request.digests[place], group), slot_of[group, place])
            for group in self._groups.order
            for place in self._groups.needed(group, first, num_blocks)
        ]
        slots = [each.slot for each in found]
        if not found or not self._pays(slots, num_blocks - first):
            return 0, False
        self._found[request.seq_id] = found
        return (num_blocks - first) * self._block_size, self._has_states or NOWHERE in slots

    def _place_of(self, name: bytes) -> int | None:
        """Return the slot of a block in the host's memory, or `NOWHERE`: in a file. None: it isn't here."""
        slot = self._slot_of.get(name)
        return NOWHERE if slot is None and self._is_in_files(name) else slot

    def _pays(self, slots: Sequence[int], num_blocks: int) -> bool:
        """Whether to load blocks that are in these slots, instead of computing the tokens of `num_blocks` blocks."""
        num_in_files = sum(slot == NOWHERE for slot in slots)
        took_s = 0.0
        if num_in_files:
            took_s += self._cost.fetch_s(num_in_files, is_local=False)
        if num_in_files < len(slots):
            took_s += self._cost.fetch_s(len(slots) - num_in_files, is_local=True)
        if self._settings.always_load or took_s < self._cost.compute_s(num_blocks):
            return True
        self._num_declined += 1
        return self._num_declined % _PROBE_EVERY == 0

    def _is_in_files(self, name: bytes) -> bool:
        if not self._directories or self._num_clearing:
            return False
        return all(path_of(directory, name).exists() for directory in self._directories)

    def update_state_after_alloc_all_groups(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        found = self._found.pop(request.seq_id)
        is_async = self._has_states or any(each.slot == NOWHERE for each in found)
        first = min(each.place for each in found)
        found = [each for each in found if each.place < first + num_external_tokens // self._block_size]
        in_files = {each.place for each in found if each.slot == NOWHERE}
        end = found[-1].place + 1
        self._taken[request.seq_id] = [
            place in in_files for place in range(end - num_external_tokens // self._block_size, end)
        ]
        sources: list[BlockSource] = []
        for group, place, name, slot in found:
            if slot != NOWHERE:
                self._pinned[slot] += 1
                self._slot_of.move_to_end(name)
            sources.append(BlockSource(block_ids[group][place], slot, b"" if slot != NOWHERE else name))
        used = [source.slot for source in sources if source.slot != NOWHERE]
        if is_async:
            self._orders.jobs.append(LoadJob(request.seq_id, sources))
            self._job_slots[request.seq_id] = used
        else:
            self._orders.loads += sources
            self._loading_slots += used

    def get_external_cache_hit_sources(self, request: TransferRequest, num_external_tokens: int) -> dict[str, int]:
        blocks = self._taken.pop(request.seq_id, [])[: num_external_tokens // self._block_size]
        num_on_disk = sum(blocks) * self._block_size
        return {"host": len(blocks) * self._block_size - num_on_disk, "disk": num_on_disk}

    def load_abandoned(self, request: TransferRequest) -> None:
        self._orders.cancelled.append(request.seq_id)

    def request_finished_all_groups(
        self, request: TransferRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        self._found.pop(request.seq_id, None)
        self._taken.pop(request.seq_id, None)
        return False, None

    # ---- saves

    def blocks_stored_of_group(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int, group: int
    ) -> None:
        if not self._saves_blocks:
            return
        for place, (digest, block) in enumerate(zip(digests, block_ids, strict=True), first):
            if len(self._orders.saves) >= _MAX_SAVES_PER_STEP:
                return
            name = block_name(digest, group)
            is_in_memory = name in self._slot_of
            if is_in_memory:
                self._slot_of.move_to_end(name)
            slot = NOWHERE if is_in_memory else self._take_slot(name)
            to_file = bool(self._directories) and not self._num_clearing and not self._is_in_files(name)
            if slot != NOWHERE or to_file:
                self._orders.saves.append(Save(name, block, slot, to_file))
            if slot != NOWHERE and self._makes_events and group < self._num_groups:
                self._told[name] = digest, group
                parent = request.digests[place - 1] if place else None
                self._events.append(
                    BlockStored(
                        [digest], parent, [], self._block_size, None, MEDIUM_CPU, None, group_idx=self._index(group)
                    )
                )

    def _index(self, group: int) -> int | None:
        """A group as events name it."""
        return group if self._num_groups > 1 else None

    def _take_slot(self, name: bytes) -> int:
        """Return a slot for a block, in which the least recently used block may have been; or `NOWHERE`."""
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((each for each, slot in self._slot_of.items() if not self._pinned[slot]), None)
            if oldest is None:
                return NOWHERE
            slot = self._forget(oldest)
        self._slot_of[name] = slot
        return slot

    def _unpin(self, slots: Iterable[int]) -> None:
        self._pinned.subtract(slots)
        unused = {slot for slot in self._forgotten if self._pinned[slot] <= 0}
        self._forgotten -= unused
        self._free += unused

    def _forget(self, name: bytes) -> int:
        if name in self._told:
            digest, group = self._told.pop(name)
            self._events.append(BlockRemoved([digest], MEDIUM_CPU, group_idx=self._index(group)))
        return self._slot_of.pop(name)

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
