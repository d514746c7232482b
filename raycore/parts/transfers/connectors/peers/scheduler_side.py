"""The scheduler's side: decides which prefixes are read from other ranks, and tells workers what others may read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from raycore.kvcache.cache_log import CacheLog
from raycore.kvcache.prefix_cache import state_name
from raycore.messages import StepPlan, TransferResult
from raycore.parts.transfers.connectors.connector import BlockIds, ConnectorSetup, TransferRequest
from raycore.parts.transfers.connectors.cost import CostModel
from raycore.parts.transfers.connectors.groups import GroupBlocks, GroupedConnector, block_name
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks, as_hints, parse_address, read_hints
from raycore.parts.transfers.connectors.peers.notes import Fetch, Lease, ToScheduler, ToWorkers, WorkerInfo, joined
from raycore.parts.transfers.connectors.peers.server import machine_id
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, PeersSettings
from raycore.parts.transfers.connectors.peers.tickets import CallerParams, read_caller_params, tickets_of
from raycore.system import secrets, time

logger = logging.getLogger(__name__)

_LEAST_LEASE_S = 1.0
"""For so many seconds, a prompt's blocks are kept for the rank that goes on even if other requests need them. If that
rank has died, nobody reads them."""
_MAX_WARNINGS = 5
"""So many failed fetches are logged as warnings."""


class PeersScheduler(GroupedConnector):
    """Reads a request's prefix from the rank that the request names, where that takes less time than computing it."""

    def __init__(self, setup: ConnectorSetup, settings: PeersSettings) -> None:
        self.addresses = ()
        self.cache_log = self._log = CacheLog()
        self._settings = settings
        transfer = setup.config.kv_transfer_config
        assert transfer is not None, "there is a connector"
        self._gives, self._takes = transfer.is_producer, transfer.is_consumer
        """Whether other ranks may read from this one, and whether it reads from them."""
        self._num_workers = setup.num_workers
        self._block_size = setup.config.tokens_per_block
        self._groups = GroupBlocks.of(setup.cache, self._block_size)
        self._state_group = setup.cache.layout.num_groups
        """The first part of states, if there are any."""
        self._has_states = setup.cache.num_state_parts > 0
        self._states: set[bytes] = set()
        """The digests of the prefixes that have a state here."""
        self._cost = CostModel(1, self._block_size)
        self._machine = machine_id()
        self._changes: dict[bytes, int | None] = {}
        """By `block_name`, what the workers have to be told: the block that has its content. None: none has."""
        self._is_cleared = False
        self._fetches: list[Fetch] = []
        self._abandoned: list[int] = []
        self._leases: list[Lease] = []
        self._loading: set[int] = set()
        """The seq_ids of requests whose fetches haven't been reported."""
        self._asked: set[int] = set()
        """Those of unfinished requests whose blocks some fetch has asked for."""
        self._releases: list[Fetch] = []
        self._num_failures = 0

    # ---- requests

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        remote = self._remote(request)
        if remote is None or request.seq_id in self._loading:
            return 0, False
        num_blocks = self._num_remote_blocks(request, remote, num_computed_tokens)
        if not num_blocks or num_blocks * self._block_size < self._settings.min_fetch_tokens:
            return 0, False
        if self._settings.compare_costs and not remote.is_cheapest:
            is_local = bool(self._machine) and parse_address(remote.workers[0]).machine == self._machine
            end = num_computed_tokens // self._block_size + num_blocks
            num_read = self._groups.num_needed(end - num_blocks, end)
            if not self._cost.is_worth_fetching(num_blocks, is_local=is_local, num_read=num_read):
                return 0, False
        return num_blocks * self._block_size, True

    def _num_remote_blocks(self, request: TransferRequest, remote: RemoteBlocks, num_computed_tokens: int) -> int:
        """Return how many blocks after the first `num_computed_tokens` tokens the other rank has."""
        # the last token is computed in any case
        num_tokens = min(remote.num_tokens, len(request.tokens) - 1)
        end = min(num_tokens // self._block_size, len(request.digests))
        return max(0, end - num_computed_tokens // self._block_size)

    def update_state_after_alloc_all_groups(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        remote = self._remote(request)
        if remote is None or not num_external_tokens:
            return
        end = len(block_ids[0])
        first = end - num_external_tokens // self._block_size
        needed = [(group, place) for group in self._groups.order for place in self._groups.needed(group, first, end)]
        names = joined(block_name(request.digests[place], group) for group, place in needed)
        blocks = [block_ids[group][place] for group, place in needed]
        self._fetches.append(self._fetch(request, remote, names, blocks))
        self._loading.add(request.seq_id)
        self._asked.add(request.seq_id)

    def _fetch(self, request: TransferRequest, remote: RemoteBlocks, digests: bytes, blocks: list[int]) -> Fetch:
        timeout_s = self._settings.fetch_timeout_s
        return Fetch(request.seq_id, remote.workers, digests, blocks, timeout_s, remote.lease)

    def request_finished_all_groups(
        self, request: TransferRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        remote = self._remote(request)
        if remote is not None and remote.lease and request.seq_id not in self._asked:
            self._releases.append(self._fetch(request, remote, b"", []))
        self._asked.discard(request.seq_id)
        return False, None

    def get_external_cache_hit_sources(self, request: TransferRequest, num_external_tokens: int) -> dict[str, int]:
        return {"p2p": num_external_tokens}

    def load_abandoned(self, request: TransferRequest) -> None:
        self._abandoned.append(request.seq_id)

    def _num_usable(self, request: TransferRequest) -> int:
        """Return how many of the first tokens of a request that has left others can go on from."""
        count = request.num_computed_tokens // self._block_size
        if self._has_states:
            count = next((each for each in range(count, 0, -1) if request.digests[each - 1] in self._states), 0)
        return count * self._block_size

    def _remote(self, request: TransferRequest) -> RemoteBlocks | None:
        """Where blocks of a request's prompt are that this rank can read. None: nowhere."""
        remote = read_hints(request.hints) if self._takes else None
        return remote if remote is not None and len(remote.workers) == self._num_workers else None

    # ---- blocks of the prefix cache

    def blocks_stored_of_group(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int, group: int
    ) -> None:
        if self._gives:
            self._changes.update(zip((block_name(each, group) for each in digests), block_ids, strict=True))
        if not group:
            self._log.stored(digests)
        elif group == self._state_group:
            self._states.update(digests)
            self._log.stored(map(state_name, digests))

    def block_removed_of_group(self, digest: bytes, group: int) -> None:
        if self._gives:
            self._changes[block_name(digest, group)] = None
        if not group:
            self._log.removed([digest])
        elif group == self._state_group:
            self._states.discard(digest)
            self._log.removed([state_name(digest)])

    def cache_cleared(self) -> None:
        self._changes.clear()
        self._states.clear()
        self._is_cleared = True
        self._log.cleared()

    def cache_lost(self) -> None:
        self._loading.clear()
        self._fetches, self._abandoned, self._leases, self._releases = [], [], [], []

    def take_identity(self, identity: bytes) -> None:
        self._log.take_identity(identity)

    # ---- steps

    def build_connector_meta(self, plan: StepPlan) -> bytes | None:
        if not self.has_pending_push_work():
            return None
        stored = {digest: block for digest, block in self._changes.items() if block is not None}
        message = ToWorkers(
            self._is_cleared,
            joined(self._changes),
            joined(stored),
            list(stored.values()),
            self._leases,
            self._abandoned,
            self._fetches,
            self._releases,
        )
        self._is_cleared = False
        self._changes = {}
        self._fetches, self._abandoned, self._leases, self._releases = [], [], [], []
        return msgspec.msgpack.encode(message)

    def has_pending_push_work(self) -> bool:
        lists = self._leases or self._abandoned or self._fetches or self._releases
        return bool(self._changes or self._is_cleared or lists)

    def update_connector_output(self, result: TransferResult) -> None:
        for reply in result.reply:
            for arrived in msgspec.msgpack.decode(reply, type=ToScheduler).arrived:
                if arrived.num_bytes:
                    self._cost.observe_fetch(arrived.num_bytes, arrived.took_s, is_local=arrived.is_local)
                if arrived.why_failed:
                    self._cost.observe_failure(is_local=arrived.is_local)
                    self._log_failure(arrived.num_failed, arrived.why_failed)
        self._loading.difference_update(result.received)

    def observe_step(self, num_tokens: int, duration_s: float) -> None:
        self._cost.observe_step(num_tokens, duration_s)

    def _log_failure(self, num_blocks: int, why: str) -> None:
        self._num_failures += 1
        level = logging.WARNING if self._num_failures <= _MAX_WARNINGS else logging.DEBUG
        logger.log(level, "%d blocks weren't read from another rank, and are computed: %s", num_blocks, why)

    # ---- all else

    def set_xfer_handshake_metadata(self, metadata: dict[int, bytes]) -> None:
        infos = [msgspec.msgpack.decode(metadata[worker], type=WorkerInfo) for worker in range(self._num_workers)]
        self.addresses = [info.address for info in infos] if self._gives else ()
        self._cost = CostModel(max(info.block_bytes for info in infos), self._block_size)

    def reset_cache(self) -> bool:
        return True


class DisaggregationScheduler(PeersScheduler):
    """Keeps the blocks of prompts for the ranks that continue their requests, and reads those of others.

    These are ranks of this engine, which its client's hints name, and of other engines, which a caller's ticket names.
    """

    def __init__(self, setup: ConnectorSetup, settings: DisaggregationSettings) -> None:
        """Raises InvalidConfig if the secret can't be read."""
        super().__init__(setup, settings)
        transfer = setup.config.kv_transfer_config
        self._engine_id = (transfer and transfer.engine_id) or setup.config.engine_name or ""
        self._tickets = tickets_of(settings.secret_file)
        self._identity = ""
        self._named: dict[int, RemoteBlocks] = {}
        """By seq_id: what the tickets of unfinished requests say."""
        self._lease_s = settings.lease_s
        self._leased: dict[int, float] = {}
        """By seq_id, oldest first: until when blocks are kept although others lack blocks."""
        self._prefix = secrets.token_hex(8)
        """Tells this process's leases from those of others."""

    def on_new_request(self, request: TransferRequest) -> None:
        if not (self._takes and (request.kv_transfer_params or {}).get("do_remote_prefill")):
            return
        try:
            remote = self._tickets.open(read_caller_params(request.kv_transfer_params).remote_ticket)
        except ValueError as error:  # its client has another secret
            self._log_failure(0, str(error))
            return
        why = ""
        if remote.identity != self._identity:
            why = "its weights, or the options with which they are read, are others"
        elif len(remote.workers) != self._num_workers:
            why = f"it has {len(remote.workers)} workers in a rank, and this one {self._num_workers}"
        if why:
            self._log_failure(remote.num_tokens // self._block_size, f"engine {remote.engine_id!r}: {why}")
        else:
            self._named[request.seq_id] = remote

    def _remote(self, request: TransferRequest) -> RemoteBlocks | None:
        hinted = super()._remote(request)
        return hinted if hinted is not None and hinted.lease else self._named.get(request.seq_id, hinted)

    def request_finished_all_groups(
        self, request: TransferRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished_all_groups(request, block_ids)
        self._named.pop(request.seq_id, None)
        is_wanted = request.hands_over or (request.kv_transfer_params or {}).get("do_remote_decode")
        num_tokens = self._num_usable(request)
        if not (is_wanted and self._gives) or request.is_aborted or not num_tokens:
            return False, None
        lease = f"{self._prefix} {request.seq_id}"
        self._leases.append(Lease(lease, request.seq_id, self._lease_s))
        self._leased[request.seq_id] = time.monotonic() + min(self._lease_s, _LEAST_LEASE_S)
        workers = list(self.addresses)
        kept = RemoteBlocks(workers, num_tokens, lease, True, self._engine_id, self._identity)
        if request.hands_over:
            return True, as_hints(kept)
        ticket = self._tickets.seal(kept)
        told = CallerParams(do_remote_prefill=True, remote_engine_id=self._engine_id, remote_ticket=ticket)
        return True, msgspec.to_builtins(told)

    def take_identity(self, identity: bytes) -> None:
        super().take_identity(identity)
        self._identity = identity.hex()

    def give_up_send(self) -> int | None:
        seq_id = next(iter(self._leased), None)
        if seq_id is None or self._leased[seq_id] > time.monotonic():
            return None
        del self._leased[seq_id]
        return seq_id

    def update_connector_output(self, result: TransferResult) -> None:
        super().update_connector_output(result)
        for seq_id in result.sent:
            self._leased.pop(seq_id, None)

    def cache_lost(self) -> None:
        super().cache_lost()
        self._leased.clear()
