"""A KV connector for `FakeEngineCore`: both sides in one object, with transfers that are late, fail, or never end.

It keeps what blocks of the prefix cache have had, and gives that back. What is loaded is written to the simulated
cache, and what failed is garbage, so that any use of it is noticed. Blocks that are being sent must not change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np

from raycore.cache_layout import first_seen_block
from raycore.kvcache.block_table import NO_BLOCK
from raycore.messages import StepPlan, TransferResult
from raycore.parts.transfers.connectors.connector import SchedulerConnector
from raycore.parts.transfers.connectors.groups import GroupBlocks, block_name

GARBAGE = -7


class Orders(msgspec.Struct):
    """What the scheduler's side tells the workers' with a plan."""

    saves: list[tuple[bytes, int]] = []
    step_loads: list[tuple[list[bytes], list[int]]] = []
    loads: list[tuple[int, list[bytes], list[int]]] = []
    sends: list[tuple[int, list[int]]] = []


@dataclass
class Chances:
    """How often what happens, from 0 to 1."""

    is_async: float = 0.5
    is_undecided: float = 0.0
    fails: float = 0.0
    keeps_blocks: float = 0.0
    """When requests end or are preempted."""
    is_done: float = 0.5
    """With each step: an asynchronous transfer."""
    gives_up: float = 0.0
    """When a request lacks blocks: a send."""
    loses_good: float = 0.0
    """With each step: a block that had been right is reported as failed."""
    partial: bool = False
    """Whether loads may end within a block."""


@dataclass
class Load:
    """An asynchronous load under way."""

    seq_id: int
    digests: list[bytes]
    blocks: list[int]


@dataclass
class FakeConnector(SchedulerConnector):
    """See above. `store`: (tokens, positions) by digest. It knows one group of layers."""

    block_size: int
    chances: Chances = field(default_factory=Chances)
    seed: int = 0
    store: dict[bytes, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    num_state_parts: int = 0
    """Of a model whose layers keep states."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.orders = Orders()
        self.stored: list[tuple[bytes, int]] = []
        self.group_of: dict[bytes, int] = {}
        """By digest, if it isn't the first one."""
        self.offered: dict[int, tuple[int, int, bool]] = {}
        self.num_loaded = self.num_failed = self.num_kept = self.num_steps_with_loads = 0
        self.num_abandoned = self.num_given_up = 0
        self.ended: list[int] = []
        # the workers' side
        self.loads: list[Load] = []
        self.sends: list[tuple[int, list[int], np.ndarray]] = []
        self.is_stuck = False

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    # ---- the scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        assert num_computed_tokens % self.block_size == 0
        if self.happens(self.chances.is_undecided):
            return None, False
        first = num_computed_tokens // self.block_size
        found = 0
        for digest in request.digests[first:]:
            if digest not in self.store:
                break
            found += self.block_size
        is_async = self.happens(self.chances.is_async)
        if found and is_async and self.chances.partial:
            found -= self.random.randrange(self.block_size)
        self.offered[request.seq_id] = (first, found, is_async)
        return found, is_async

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        first, found, is_async = self.offered[request.seq_id]
        assert 0 < num_external_tokens <= found
        assert num_external_tokens == found or num_external_tokens % self.block_size == 0
        self.num_loaded += num_external_tokens
        end = first + -(-num_external_tokens // self.block_size)
        digests, blocks = request.digests[first:end], list(block_ids[first:end])
        if is_async:
            assert len(block_ids) == end
            self.orders.loads.append((request.seq_id, digests, blocks))
        else:
            assert num_external_tokens % self.block_size == 0
            self.orders.step_loads.append((digests, blocks))
            self.num_steps_with_loads += 1

    def request_finished(self, request, block_ids):
        self.ended.append(request.seq_id)
        params = {"ended": request.seq_id}
        return (self._keeps(request, block_ids), params)

    def request_preempted(self, request, block_ids):
        return self._keeps(request, block_ids)

    def _keeps(self, request, block_ids) -> bool:
        if not block_ids or not self.happens(self.chances.keeps_blocks):
            return False
        self.num_kept += 1
        self.orders.sends.append((request.seq_id, list(block_ids)))
        return True

    def give_up_send(self):
        sending = [*(seq_id for seq_id, _, _ in self.sends), *(seq_id for seq_id, _ in self.orders.sends)]
        if not sending or not self.happens(self.chances.gives_up):
            return None
        self.num_given_up += 1
        self.sends = [each for each in self.sends if each[0] != sending[0]]
        self.orders.sends = [each for each in self.orders.sends if each[0] != sending[0]]
        return sending[0]

    def load_abandoned(self, request):
        self.num_abandoned += 1

    def blocks_stored(self, request, digests, block_ids, first):
        assert list(digests) == request.digests[first : first + len(digests)]
        self.stored += zip(digests, block_ids, strict=True)

    def cache_lost(self):
        self.stored, self.orders, self.loads, self.sends = [], Orders(), [], []

    def build_connector_meta(self, plan):
        self.orders.saves, self.stored = self.stored, []
        orders, self.orders = self.orders, Orders()
        return msgspec.msgpack.encode(orders)

    def has_pending_push_work(self):
        return bool(self.stored)

    # ---- the workers' side

    def begin(self, plan: StepPlan, runner) -> None:
        """Before a step."""
        self.failed: list[int] = []
        assert plan.transfer is not None
        orders = msgspec.msgpack.decode(plan.transfer, type=Orders)
        for digest, block in orders.saves:
            tokens, positions = self._content(runner, block)
            known = self.store.setdefault(digest, (tokens, positions))
            assert (known[0] == tokens).all(), "saved something else"
        for seq_id, blocks in orders.sends:
            self.sends.append((seq_id, blocks, runner.kv_tokens[blocks].copy()))
        for digests, blocks in orders.step_loads:
            for digest, block in zip(digests, blocks, strict=True):
                if self.happens(self.chances.fails):
                    self._spoil(runner, block)
                    self.failed.append(block)
                else:
                    self._write(runner, digest, block)
        for seq_id, digests, blocks in orders.loads:
            self.loads.append(Load(seq_id, digests, blocks))
            for block in blocks:
                self._spoil(runner, block)

    def end(self, runner) -> TransferResult | None:
        """After a step."""
        sent: list[int] = []
        received: list[int] = []
        for load in [] if self.is_stuck else list(self.loads):
            if self.happens(self.chances.is_done):
                self.loads.remove(load)
                received.append(load.seq_id)
                for digest, block in zip(load.digests, load.blocks, strict=True):
                    if self.happens(self.chances.fails):
                        self.failed.append(block)
                    else:
                        self._write(runner, digest, block)
        for entry in list(self.sends):
            seq_id, blocks, content = entry
            assert (runner.kv_tokens[blocks] == content).all(), "a block that is being sent has changed"
            is_oldest = entry is next(each for each in self.sends if each[0] == seq_id)
            if is_oldest and self.happens(self.chances.is_done):
                self.sends = [each for each in self.sends if each is not entry]
                sent.append(seq_id)
        self.num_failed += len(self.failed)
        if self.happens(self.chances.loses_good):
            self.failed.append(self.random.randrange(len(runner.kv_tokens)))
        return TransferResult(sent, received, self.failed) if sent or received or self.failed else None

    def _content(self, runner, block: int) -> tuple[np.ndarray, np.ndarray]:
        """What is saved of a block: tokens and their positions; of a part of a state, the tokens, and which part."""
        if block >= len(runner.kv_tokens):
            row, part = self._row_of(runner, block)
            return np.array(runner.states.tokens[row]), np.array([part])
        tokens, positions = runner.kv_tokens[block].copy(), runner.kv_positions[block].copy()
        assert positions[0] % self.block_size == 0
        assert positions.tolist() == list(range(positions[0], positions[0] + self.block_size)), "saved too early"
        return tokens, positions

    def _row_of(self, runner, block: int) -> tuple[int, int]:
        return divmod(block - len(runner.kv_tokens), self.num_state_parts)

    def _spoil(self, runner, block: int) -> None:
        if block >= len(runner.kv_tokens):
            runner.states.tokens[self._row_of(runner, block)[0]] = [GARBAGE]
            return
        runner.kv_tokens[block] = GARBAGE
        runner.kv_positions[block] = GARBAGE

    def _write(self, runner, digest: bytes, block: int) -> None:
        if block >= len(runner.kv_tokens):
            row, part = self._row_of(runner, block)
            tokens, saved_part = self.store[digest]
            assert saved_part == part
            assert runner.states.tokens[row] in ([GARBAGE], tokens.tolist()), "a row that is loaded was written"
            runner.states.tokens[row] = tokens.tolist()
            return
        runner.kv_tokens[block], runner.kv_positions[block] = self.store[digest]
        runner.kv_groups[block] = self.group_of.get(digest, 0)


@dataclass
class FakeGroupsConnector(FakeConnector):
    """The same for models whose layers are divided into groups. `windows`: those of the groups."""

    windows: tuple[int | None, ...] = (None,)

    @property
    def all_windows(self) -> tuple[int | None, ...]:
        """Those of the parts of states, too."""
        return (*self.windows, *[2] * self.num_state_parts)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if self.happens(self.chances.is_undecided):
            return None, False
        size, first = self.block_size, num_computed_tokens // self.block_size

        def has(group: int, place: int) -> bool:
            return block_name(request.digests[place], group) in self.store

        most = min((len(request.tokens) - 1) // size, len(request.digests))
        end = GroupBlocks(self.all_windows, size).longest(first, most, has)
        is_async, found = self.happens(self.chances.is_async), (end - first) * size
        if found and is_async and self.chances.partial and not self.num_state_parts:
            fewer = found - self.random.randrange(size)
            if all(has(*each) for each in self._needed(first, num_computed_tokens + fewer)):
                found = fewer
        self.offered[request.seq_id] = (first, found, is_async)
        return found, is_async

    def _needed(self, first: int, num_tokens: int) -> list[tuple[int, int]]:
        """(group, place) of the blocks for the first `num_tokens` tokens, of which `first` blocks are there."""
        seen = [0 if each is None else first_seen_block(each, num_tokens, self.block_size) for each in self.all_windows]
        end = -(-num_tokens // self.block_size)
        return [(group, place) for group, least in enumerate(seen) for place in range(max(first, least), end)]

    def update_state_after_alloc_all_groups(self, request, block_ids, num_external_tokens):
        first, found, is_async = self.offered[request.seq_id]
        assert 0 < num_external_tokens <= found
        assert num_external_tokens == found or self.all_windows == (None,)
        assert is_async or not self.num_state_parts
        self.num_loaded += num_external_tokens
        needed = self._needed(first, first * self.block_size + num_external_tokens)
        names = [block_name(request.digests[place], group) for group, place in needed]
        blocks = [block_ids[group][place] for group, place in needed]
        assert NO_BLOCK not in blocks
        if is_async:
            self.orders.loads.append((request.seq_id, names, blocks))
        else:
            self.orders.step_loads.append((names, blocks))
            self.num_steps_with_loads += 1

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, self._held(block_ids))

    def request_preempted_all_groups(self, request, block_ids):
        return self.request_preempted(request, self._held(block_ids))

    def _held(self, block_ids) -> list[int]:
        assert len(block_ids) == len(self.windows)
        assert len({len(ids) for ids in block_ids}) == 1
        return [block for ids in block_ids for block in ids if block != NO_BLOCK]

    def blocks_stored_of_group(self, request, digests, block_ids, first, group):
        assert list(digests) == request.digests[first : first + len(digests)]
        names = [block_name(digest, group) for digest in digests]
        self.group_of |= dict.fromkeys(names, group)
        self.stored += zip(names, block_ids, strict=True)
