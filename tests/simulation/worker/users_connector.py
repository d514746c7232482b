"""A KV connector as users write their own: it does whatever the interface allows, as chance has it.

What blocks of the prefix cache have had is kept in a store that outlives ranks. Loads come with a step or some steps
later, may end within a block, or fail. Requests that end or are preempted may leave blocks behind for a while.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from raycore.messages import StepPlan
from raycore.parts.transfers.connectors.connector import (
    ConnectorSetup,
    KVConnectorBase,
    KVConnectorRole,
    TransferRequest,
)
from simulation.worker import complaints
from simulation.world import kernel


class Chances(msgspec.Struct):
    """`kv_connector_extra_config`: how often what happens, from 0 to 1."""

    is_async: float = 0.5
    is_undecided: float = 0.0
    is_partial: float = 0.0
    """A load with steps that come later ends within a block."""
    fails: float = 0.0
    """A block of a load."""
    loses_good: float = 0.0
    """A block that was right is reported as one that wasn't loaded, with each step."""
    keeps_blocks: float = 0.0
    is_done: float = 0.3
    """What is under way, with each step."""
    gives_up: float = 0.0
    """Blocks that are kept, if a request lacks some."""


class Orders(msgspec.Struct):
    """What the workers are told with a plan."""

    given_up: list[int] = []
    saves: list[tuple[bytes, int]] = []
    step_loads: list[tuple[list[bytes], list[int]]] = []
    loads: list[tuple[int, list[bytes], list[int]]] = []
    sends: list[tuple[int, list[int]]] = []


@dataclass
class _Load:
    seq_id: int
    digests: list[bytes]
    blocks: list[int]


@dataclass
class _Send:
    seq_id: int
    blocks: list[int]
    content: list[bytes]


class UsersConnector(KVConnectorBase):
    """See the module."""

    def __init__(self, setup: ConnectorSetup, role: KVConnectorRole) -> None:
        super().__init__(setup, role)
        world = kernel.the_world
        assert world is not None, "it is for engines in a world"
        self._seed = world.seed
        self._chances = msgspec.convert(setup.extra, Chances)
        self._draws = world.systems.setdefault("users' connectors", world.generator("users' connectors"))
        self._store: dict[tuple[int, bytes], bytes] = world.systems.setdefault("store of a users' connector", {})
        self._block_size = setup.config.tokens_per_block
        # the scheduler's side
        self._orders = Orders()
        self._offered: dict[int, tuple[int, bool]] = {}
        self._kept: dict[int, None] = {}
        self._given_up: set[int] = set()
        # the workers' side
        self._caches: Any = None
        self.loads: list[_Load] = []
        self.sends: list[_Send] = []
        self._failed: list[int] = []

    def _happens(self, chance: float) -> bool:
        return self._draws.random() < chance

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._happens(self._chances.is_undecided):
            return None, False
        first, found = num_computed_tokens // self._block_size, 0
        for digest in request.digests[first:]:
            if not all((worker, digest) in self._store for worker in range(self.setup.num_workers)):
                break
            found += self._block_size
        is_async = self._happens(self._chances.is_async)
        if found and is_async and self._happens(self._chances.is_partial):
            found -= self._draws.randrange(self._block_size)
        self._offered[request.seq_id] = first, is_async
        return found, is_async

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        first, is_async = self._offered.pop(request.seq_id)
        end = first + -(-num_external_tokens // self._block_size)
        digests, blocks = request.digests[first:end], list(block_ids[first:end])
        if is_async:
            self._orders.loads.append((request.seq_id, digests, blocks))
        else:
            self._orders.step_loads.append((digests, blocks))

    def request_finished(
        self, request: TransferRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offered.pop(request.seq_id, None)
        return self._keeps(request, block_ids), None

    def request_preempted(self, request: TransferRequest, block_ids: Sequence[int]) -> bool:
        return self._keeps(request, block_ids)

    def _keeps(self, request: TransferRequest, block_ids: Sequence[int]) -> bool:
        is_possible = block_ids and request.seq_id not in self._given_up
        if not is_possible or not self._happens(self._chances.keeps_blocks):
            return False
        self._orders.sends.append((request.seq_id, list(block_ids)))
        self._kept[request.seq_id] = None
        return True

    def give_up_send(self) -> int | None:
        if not self._kept or not self._happens(self._chances.gives_up):
            return None
        seq_id = next(iter(self._kept))
        del self._kept[seq_id]
        self._given_up.add(seq_id)
        self._orders.sends = [each for each in self._orders.sends if each[0] != seq_id]
        self._orders.given_up.append(seq_id)
        return seq_id

    def blocks_stored(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int
    ) -> None:
        if list(digests) != list(request.digests[first : first + len(digests)]):
            complaints.disagrees(f"a connector is told of blocks from {first} on which request {request.seq_id} hasn't")
        self._orders.saves += zip(digests, block_ids, strict=True)

    def cache_lost(self) -> None:
        self._orders = Orders()
        self._kept.clear()

    def build_connector_meta(self, plan: StepPlan) -> bytes | None:
        orders, self._orders = self._orders, Orders()
        return None if orders == Orders() else msgspec.msgpack.encode(orders)

    def has_pending_push_work(self) -> bool:
        return self._orders != Orders()

    # ---- the workers' side

    def register_kv_caches(self, caches: Any) -> None:
        self._caches = caches

    def release_kv_caches(self) -> None:
        self._caches, self.loads, self.sends, self._failed = None, [], [], []

    def start_load_kv(self, plan: StepPlan) -> None:
        orders = Orders() if self.metadata is None else msgspec.msgpack.decode(self.metadata, type=Orders)
        self.sends = [each for each in self.sends if each.seq_id not in orders.given_up]
        for digest, block in orders.saves:
            content = self._read(block)
            if self._store.setdefault((self._worker, digest), content) != content:
                complaints.disagrees(f"block {block} has other keys and values than others with its tokens had")
        self.sends += [_Send(seq_id, blocks, [*map(self._read, blocks)]) for seq_id, blocks in orders.sends]
        # workers compute the same, also of blocks that didn't come
        draws = random.Random(f"step {plan.step} of dp_rank {self.setup.dp_rank}, {self._seed}")
        for digests, blocks in orders.step_loads:
            self._load(digests, blocks, draws)
        self.loads += [_Load(*each) for each in orders.loads]

    def get_finished(self) -> tuple[list[int], list[int]]:
        done = [each for each in self.loads if self._happens(self._chances.is_done)]
        self.loads = [each for each in self.loads if each not in done]
        for each in done:
            self._load(each.digests, each.blocks, self._draws)
        sent: list[int] = []
        for each in list(self.sends):
            if [*map(self._read, each.blocks)] != each.content:
                complaints.disagrees(f"blocks of request {each.seq_id} have changed while they were kept")
            is_oldest = each is next(other for other in self.sends if other.seq_id == each.seq_id)
            if is_oldest and self._happens(self._chances.is_done):
                self.sends.remove(each)
                sent.append(each.seq_id)
        return sent, [each.seq_id for each in done]

    def get_block_ids_with_load_errors(self) -> list[int]:
        failed, self._failed = self._failed, []
        if self._happens(self._chances.loses_good):
            failed.append(self._draws.randrange(self._caches.num_blocks))
        return [*dict.fromkeys(failed)]

    @property
    def _worker(self) -> int:
        assert self.setup.worker is not None
        return self.setup.worker

    def _read(self, block: int) -> bytes:
        content = np.empty(self._caches.block_bytes, np.uint8)
        self._caches.read(block, content)
        return content.tobytes()

    def _load(self, digests: Sequence[bytes], blocks: Sequence[int], draws: random.Random) -> None:
        for digest, block in zip(digests, blocks, strict=True):
            content = self._store[self._worker, digest]
            if draws.random() < self._chances.fails:
                self._failed.append(block)
                content = bytes(len(content))
            self._caches.write(block, np.frombuffer(content, np.uint8))
