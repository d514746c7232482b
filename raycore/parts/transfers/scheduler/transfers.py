"""What a KV connector has under way for one scheduler: requests that wait for blocks, and blocks that must stay.

A request whose prefix is elsewhere either loads it in its first step, or waits with its blocks until they have arrived.
What was loaded is only published in the prefix cache when no worker has reported a failure, so that no other request
ever uses a block that wasn't loaded. Blocks that something may still write or read keep a reference, whatever becomes
of their request.

In a group of layers with a window, only the blocks are loaded that tokens see which come later. So such a load can't be
used in part: if it fails, the request begins with what the prefix cache has. The same holds where layers keep states:
the state after a prefix is loaded with its blocks (`state_blocks`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from raycore.kvcache.block_table import NO_BLOCK
from raycore.kvcache.prefix_cache import CachedPrefix
from raycore.kvcache.snapshots import NO_ROW
from raycore.messages import (
    NO_ADAPTER,
    NO_EXTERNAL_HITS,
    NO_KV_FETCHES,
    ExternalHits,
    KVFetches,
    StepPlan,
    StepResult,
    TokenReport,
    TransferResult,
)
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.connectors.connector import UNSPECIFIED, SchedulerConnector
from raycore.parts.transfers.scheduler.state_blocks import NO_STATES, StateBlocks
from raycore.parts.transfers.values import PARAMS
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.part import SchedulerPart, SchedulerView, Start, Verdict
from raycore.scheduler.prefixes import runs_of
from raycore.scheduler.request import PUBLISHES_ALL, Request
from raycore.scheduler.step_builder import InFlight
from raycore.system import time

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""For how long a request waits for its blocks. Connectors have shorter deadlines of their own; this one is for those
that have lost a request."""


_NOT_LOADED = "keys and values of its prompt were not loaded, and kv_load_failure_policy is 'fail'"
_SOURCES = frozenset(ExternalHits.__struct_fields__[1:])


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks of a request without a slot, some of which are loaded."""

    request: Request
    blocks: list[list[int]]
    """By group: the last of the request's first `num_blocks` blocks. This object has a reference to each."""
    num_blocks: int
    num_cached_blocks: int
    """How many of the request's first blocks were in the prefix cache."""
    num_tokens: int
    """How many of the request's tokens they have, once they have arrived."""
    deadline_s: float
    row: int = NO_ROW
    """The row of the state after these tokens."""
    state_blocks: list[int] = field(default_factory=list[int])
    """Its parts."""

    @property
    def start(self) -> Start:
        """What the request begins with once they have arrived."""
        return Start(self.request, CachedPrefix(self.num_blocks, self.blocks), self.num_tokens, self.num_cached_blocks)

    @property
    def all_blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block for blocks in self.blocks for block in blocks]

    @property
    def ids_by_group(self) -> list[list[int]]:
        """As the connector gets them: from the request's first token on."""
        by_group = [*self.blocks, *([block] for block in self.state_blocks)]
        return [[NO_BLOCK] * (self.num_blocks - len(blocks)) + blocks for blocks in by_group]

    def loaded(self) -> dict[int, int]:
        """The blocks that weren't in the prefix cache: their places among those of their group."""
        return _places(self.ids_by_group, self.num_cached_blocks)


@dataclass(slots=True, eq=False)
class StepLoad:
    """What the first step of a request loads."""

    request: Request
    generation: int
    """That of the request's slot, which becomes another one when the request leaves it."""
    slot: int
    blocks: dict[int, int]
    """Those that are loaded: their places among those of their group."""


def _places(block_ids: list[list[int]], first: int, end: int | None = None) -> dict[int, int]:
    """Return the blocks of all groups from the place `first` to before `end`, with their places."""
    return {block: place for ids in block_ids for place, block in enumerate(ids[first:end], first) if block != NO_BLOCK}


class Transfers(SchedulerPart):
    """Connects a connector to the requests of a scheduler and to their blocks."""

    order = 40

    def __init__(
        self,
        connector: SchedulerConnector,
        config: KVTransferConfig,
        states: StateBlocks = NO_STATES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connector = connector
        self._states = states
        self.is_cache_lost = False
        """Whether the workers have just lost the cache: what requests had in it is of no use to the connector."""
        self.fails_requests = config.kv_load_failure_policy == "fail"
        self._clock = clock
        self._loading: dict[int, BlockLoad] = {}
        """By seq_id: requests that wait for blocks."""
        self._loaded: deque[BlockLoad] = deque()
        """Requests whose blocks have arrived. They are admitted before all that wait."""
        self._abandoned: dict[int, BlockLoad] = {}
        """By seq_id: blocks that are still written, and nobody waits for."""
        self._undecided: list[Request] = []
        """Requests of which the connector doesn't know yet what it can bring."""
        self._step_loads: dict[int, list[StepLoad]] = {}
        """By step: what it loads."""
        self._next_loads: list[StepLoad] = []
        """What the step loads that is being planned."""
        self._sending: dict[int, deque[list[int]]] = {}
        """By seq_id: blocks that may be read, and have a reference for that."""
        self._stored_by_step: list[tuple[Request, Sequence[bytes], Sequence[int], int, int]] = []
        """Arguments of `blocks_stored_of_group` for blocks that the step which is being planned completes."""
        self._reports: list[tuple[int, TokenReport]] = []
        """What the connector tells callers of sequences that have ended."""
        self._hints: list[tuple[int, dict[str, Any]]] = []
        """What it tells the ranks that go on with them."""
        self.hits = NO_EXTERNAL_HITS
        """What the connector has brought."""

    def attach(self, view: SchedulerView) -> None:
        self._view = view
        self._pool = view.pool
        self._table = view.blocks
        self._slots = view.slots
        self._block_size = view.blocks.block_size
        self._state_groups = list(self._states.groups(self._table.num_groups))
        self._loads_whole = self._table.frees_blocks or self._states.num_parts > 0
        self._counts_hits = bool(view.hooks.blocks_filled)  # only with a prefix cache, whose misses are asked for

    # ---- requests that wait

    def submitted(self, request: Request) -> None:
        if request.lora_name is None:
            self.connector.on_new_request(request)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are neither running nor in the waiting queue because of transfers."""
        return len(self._loading) + len(self._loaded) + len(self._undecided)

    def promised_slots(self) -> int:
        return len(self._loading) + len(self._loaded)

    def load(self) -> dict[str, Any]:
        fetches = NO_KV_FETCHES
        if self.num_waiting:
            fetches = KVFetches(len(self._undecided), len(self._loading), len(self._loaded))
        return {"external": self.hits, "kv_fetches": fetches}

    def _count(self, request: Request, num_asked: int, num_brought: int) -> None:
        """Count a request that begins: how many tokens the connector was asked for, and how many it has brought."""
        by_source: Mapping[str, int] = {}
        if num_brought:
            by_source = self.connector.get_external_cache_hit_sources(request, num_brought)
            if not by_source.keys() <= _SOURCES or sum(by_source.values()) != num_brought:
                by_source = {UNSPECIFIED: num_brought}
        before = self.hits
        changed = {source: getattr(before, source) + number for source, number in by_source.items()}
        self.hits = msgspec.structs.replace(before, num_queries=before.num_queries + num_asked, **changed)

    def offer(self, start: Start) -> Verdict:
        """Add what the connector can bring of a waiting request, after what the prefix cache has."""
        request = start.request
        if not request.may_load or request.adapter != NO_ADAPTER or not request.reads_prefix_cache:
            return Verdict.START
        if request.seq_id in self._abandoned:
            return Verdict.START  # reports name requests, so there is one load of each at a time
        size = self._block_size
        request.extend_digests(request.tokens, (len(request.tokens) - 1) // size, size)
        found, is_async = self.connector.get_num_new_matched_tokens(request, start.num_cached)
        if found is None:
            return Verdict.SET_ASIDE
        # a step samples after the last token, so that one is always computed
        num_tokens = min(found, len(request.tokens) - 1 - start.num_cached)
        if num_tokens < found or not is_async:
            num_tokens -= num_tokens % size  # connectors load whole blocks, unless they have offered a part of one
        if num_tokens <= 0 or (num_tokens < found and self._loads_whole):
            return Verdict.START
        if not self._states.may_load(is_async=is_async):
            return Verdict.START
        start.num_loaded = num_tokens
        if self._table.frees_blocks and start.cached.num_blocks:
            start.cached = self._seen(start.cached, start.num_computed)
        return Verdict.SET_ASIDE_WITH_BLOCKS if is_async else Verdict.START

    def _seen(self, cached: CachedPrefix, num_computed: int) -> CachedPrefix:
        """Leave out the cached blocks that no token sees after the first `num_computed` ones."""
        firsts = [self._table.first_seen(group, num_computed) for group in range(self._table.num_groups)]
        blocks = [
            of_group[max(0, first - (cached.num_blocks - len(of_group))) :]
            for first, of_group in zip(firsts, cached.blocks, strict=True)
        ]
        return CachedPrefix(cached.num_blocks, blocks)

    def set_aside(self, start: Start) -> None:
        """Keep a request until what it loads has arrived, or until the connector knows what that is."""
        if start.num_loaded:
            self._begin_load(start)
        else:
            self._undecided.append(start.request)

    def _begin_load(self, start: Start) -> None:
        """Take blocks for a request, and have the rest of them loaded."""
        request, cached, num_tokens = start.request, start.cached, start.num_computed
        num_blocks, groups = -(-num_tokens // self._block_size), range(self._table.num_groups)
        held = cached.blocks if cached.num_blocks else [list[int]() for _ in groups]
        for of_group in held:  # before any are taken, which may be these
            self._pool.share(of_group)
        firsts = [max(cached.num_blocks, self._table.first_seen(group, num_tokens)) for group in groups]
        blocks = [[*held[group], *self._pool.take(num_blocks - firsts[group])] for group in groups]
        row, deadline_s = self._states.reserve(), self._clock() + LOAD_TIMEOUT_S
        parts = self._states.blocks_of(row, self._pool.num_blocks)
        load = BlockLoad(request, blocks, num_blocks, cached.num_blocks, num_tokens, deadline_s, row, parts)
        self._loading[request.seq_id] = load
        self.connector.update_state_after_alloc_all_groups(request, load.ids_by_group, start.num_loaded)

    def promised_blocks(self, request: Request) -> int:
        return sum(
            self._view.num_blocks_for(len(load.request.tokens)) - len(load.all_blocks)
            for load in (*self._loading.values(), *self._loaded)
            if load.request is not request
        )

    def ready(self) -> Iterator[Start]:
        """Have requests wait again that the connector may know more of, then yield those whose blocks have arrived."""
        undecided, self._undecided = self._undecided, []
        self._view.wait_again([*undecided, *self._expire()])
        while self._loaded:
            yield self._loaded[0].start

    def started(self, start: Start) -> None:
        request = start.request
        if self._loaded and self._loaded[0].request is request:
            self._let_go(self._loaded.popleft())  # its slot has references to the blocks
        elif start.num_loaded:
            self._begin_step_load(start)
        is_asked_for = request.reads_prefix_cache and request.adapter == NO_ADAPTER
        if self._counts_hits and is_asked_for and not request.was_started:
            num_local = start.num_published * self._block_size
            self._count(request, len(request.tokens) - num_local, start.num_computed - num_local)

    def _begin_step_load(self, start: Start) -> None:
        """Have a request's first step load blocks. Publishing them waits for the step's result."""
        request, first = start.request, start.cached.num_blocks
        blocks = self._table.ids_by_group(request.slot)
        loaded = _places(blocks, first, first + start.num_loaded // self._block_size)
        generation = int(self._slots.generation[request.slot])
        request.max_published_blocks = first
        self._next_loads.append(StepLoad(request, generation, request.slot, loaded))
        self.connector.update_state_after_alloc_all_groups(request, blocks, start.num_loaded)

    # ---- requests that leave

    def aborted(self, request: Request) -> None:
        if request in self._undecided:
            self._undecided.remove(request)
        elif request.seq_id in self._loading:
            self._abandon(request.seq_id)
        else:
            for load in self._loaded:
                if load.request is request:
                    self._loaded.remove(load)
                    self._let_go(load)
                    break
        self._finish(request)

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        """Tell the connector, and keep a reference to the blocks if it wants that."""
        request.num_computed_tokens = int(min(self._slots.computed[slot], self._slots.received[slot]))
        request.max_published_blocks = PUBLISHES_ALL
        if request.adapter != NO_ADAPTER or self.is_cache_lost:
            return
        blocks = self._table.ids_by_group(slot)
        is_kept = (
            self._finish(request, blocks) if is_over else self.connector.request_preempted_all_groups(request, blocks)
        )
        held: list[int] = self._table.held(slot).tolist()
        if is_kept and held:
            self._pool.share(held)
            self._sending.setdefault(request.seq_id, deque()).append(held)

    def _finish(self, request: Request, blocks: list[list[int]] | None = None) -> bool:
        """Tell the connector that a request has ended. `blocks`: by group. None: it has none."""
        if request.lora_name is not None:
            return False
        if blocks is None:
            request.num_computed_tokens = 0  # also of one that was preempted before
            blocks = [[] for _ in range(self._table.num_groups)]
        is_kept, params = self.connector.request_finished_all_groups(request, blocks)
        if params is None:
            return is_kept
        if request.hands_over:
            self._hints.append((request.seq_id, params))
        else:
            report = TokenReport(PARAMS, len(request.tokens), 0, msgspec.msgpack.encode(params))
            self._reports.append((request.seq_id, report))
        return is_kept

    def take_back(self) -> bool:
        """Take back the blocks of a send that the connector gives up. Returns whether there was one."""
        while self._sending and (seq_id := self.connector.give_up_send()) is not None:
            sent = self._sending.pop(seq_id, None)
            if sent is not None:
                for blocks in sent:
                    self._release(blocks)
                return True
        return False

    def clearing(self) -> None:
        """Give up all blocks of requests without a slot, whose content is no longer wanted.

        What is still written keeps its blocks.
        """
        self._view.wait_again(self._give_up_loads())
        self.is_cache_lost = False  # no request has a slot now that had one when the cache was lost

    def _give_up_loads(self) -> list[Request]:
        requests = [load.request for load in (*self._loading.values(), *self._loaded)]
        for seq_id in list(self._loading):
            self._abandon(seq_id)
        while self._loaded:
            self._let_go(self._loaded.popleft())
        self._stored_by_step.clear()
        return requests

    def cache_lost(self) -> None:
        """Forget everything: nothing writes or reads blocks.

        Until `clearing`, requests that leave their slots, and blocks that are published, don't count.
        """
        self.is_cache_lost = True
        undecided, self._undecided = self._undecided, []
        self._view.wait_again([*self._give_up_loads(), *undecided])
        for load in self._abandoned.values():
            self._let_go(load)
        for sent in self._sending.values():
            for blocks in sent:
                self._release(blocks)
        self._abandoned.clear()
        self._sending.clear()
        self._step_loads.clear()
        self.connector.cache_lost()

    def identity_taken(self, identity: bytes) -> None:
        self.connector.take_identity(identity)

    # ---- steps

    def wants_step(self) -> bool:
        """Whether workers have to be asked, or told something."""
        is_waiting = self._loading or self._abandoned or self._sending or self._undecided
        return bool(is_waiting) or self.connector.has_pending_push_work()

    def blocks_stored(
        self, request: Request, indexes: Sequence[int], blocks: NDArray[np.int32], group: int, *, is_planned: bool
    ) -> None:
        """Tell the connector, after the step that is being planned if that completes the blocks."""
        if request.adapter != NO_ADAPTER or self.is_cache_lost:
            return
        for run in runs_of(indexes):
            digests, ids = request.digests[run.start : run.stop], blocks[run.start : run.stop].tolist()
            if is_planned:
                self._stored_by_step.append((request, digests, ids, run.start, group))
            else:
                self.connector.blocks_stored_of_group(request, digests, ids, run.start, group)

    def block_removed(self, digest: bytes, group: int) -> None:
        self.connector.block_removed_of_group(digest, group)

    def state_saved(self, request: Request, num_blocks: int, row: int) -> None:
        """Tell the connector after the step that is being planned, which computes the state."""
        if request.adapter != NO_ADAPTER or self.is_cache_lost:
            return
        place, parts = num_blocks - 1, self._states.blocks_of(row, self._pool.num_blocks)
        digests = request.digests[place:num_blocks]
        for group, part in zip(self._state_groups, parts, strict=True):
            self._stored_by_step.append((request, digests, [part], place, group))

    def state_removed(self, digest: bytes) -> None:
        for group in self._state_groups:
            self.connector.block_removed_of_group(digest, group)

    def blocks_cleared(self) -> None:
        self.connector.cache_cleared()

    def plan_finished(self, plan: StepPlan) -> None:
        """Add what workers' connectors are told."""
        if self._next_loads:
            self._step_loads[plan.step], self._next_loads = self._next_loads, []
        plan.transfer = self.connector.build_connector_meta(plan)
        stored, self._stored_by_step = self._stored_by_step, []
        for arguments in stored:
            self.connector.blocks_stored_of_group(*arguments)

    def result_arrived(self, step: InFlight, result: StepResult) -> None:
        """Apply what workers' connectors report with a step."""
        report, view = result.transfer, self._view
        arrived, failures, others = self.settle(step.step, [] if report is None else report.failed_blocks)
        if others:
            self._lose_blocks(others)
        view.publish([load.slot for load in arrived if self._slots.generation[load.slot] == load.generation])
        for request in failures:
            if request.slot < 0:
                continue  # it has just lost its slot with another block
            if self.fails_requests:
                view.fail(request, _NOT_LOADED)
            else:
                view.preempt(request)
        if report is not None:
            self._take_in(report)
        view.check_again()

    def result_applied(self, step: InFlight, result: StepResult, outputs: StepOutputs) -> None:
        """Add what clients get of requests that have ended."""
        outputs.hints, self._hints = self._hints, []
        outputs.reports += self._reports
        self._reports.clear()

    def _lose_blocks(self, blocks: set[int]) -> None:
        """Compute again what follows blocks that are wrong after all. Anything in the prefix cache may follow them."""
        view = self._view
        for request in self._slots.running():
            if not blocks.isdisjoint(self._table.held(request.slot).tolist()):
                request.max_published_blocks = 0
                view.preempt(request)
        view.wait_again(self._take_loads_with(blocks))
        self._states.snapshots.clear()
        self._pool.forget()

    def settle(self, step: int, failed_blocks: Collection[int]) -> tuple[list[StepLoad], list[Request], set[int]]:
        """Take in what a step has loaded. Requests that have left their slots since don't count.

        Returns: the loads that have arrived, whose blocks may be published; the requests that lack blocks; and
        the failed blocks that aren't of loads, which were right before.
        """
        others = set(failed_blocks)
        arrived: list[StepLoad] = []
        failures: list[Request] = []
        for load in self._step_loads.pop(step, ()):
            bad = min((place for block, place in load.blocks.items() if block in others), default=None)
            others.difference_update(load.blocks)
            if self._slots.generation[load.slot] != load.generation:
                continue
            load.request.max_published_blocks = PUBLISHES_ALL if bad is None else bad
            if bad is None:
                arrived.append(load)
            else:
                load.request.may_load = False
                failures.append(load.request)
        for load in (*self._loading.values(), *self._abandoned.values()):
            others.difference_update(load.loaded())
        return arrived, failures, others

    def _take_in(self, result: TransferResult) -> None:
        """Apply what workers report of asynchronous transfers."""
        failed = set(result.failed_blocks)
        for load in self._loading.values() if failed else ():
            self._cut(load, failed)
        for seq_id in result.received:
            if seq_id in self._abandoned:
                self._let_go(self._abandoned.pop(seq_id))
            elif (load := self._loading.pop(seq_id, None)) is not None:
                if self.fails_requests and not load.request.may_load:
                    self._let_go(load)
                    self._finish(load.request)
                    self._view.fail(load.request, _NOT_LOADED)
                elif self._trim(load):
                    if load.state_blocks:
                        self._keep_state(load)
                    self._loaded.append(load)
                else:
                    self._let_go(load)
                    self._view.wait_again([load.request])
        for seq_id in result.sent:
            sent = self._sending.get(seq_id)
            if sent is not None:
                self._release(sent.popleft())
                if not sent:
                    del self._sending[seq_id]
        self.connector.update_connector_output(result)

    def _keep_state(self, load: BlockLoad) -> None:
        """Let others begin with the state that a load has brought, too, and tell the connector, if it is new here."""
        place, coming = load.num_blocks - 1, load.row
        digests = load.request.digests[place : place + 1]
        load.row = self._states.snapshots.arrived(coming, digests[0])
        if load.row == coming:
            for group, part in zip(self._state_groups, load.state_blocks, strict=True):
                self.connector.blocks_stored_of_group(load.request, digests, [part], place, group)

    def _trim(self, load: BlockLoad) -> bool:
        """Give back the blocks of a load that has arrived which weren't loaded after all.

        Returns whether there are all that are seen by tokens which follow the others.
        """
        num_blocks = -(-load.num_tokens // self._block_size)
        if load.state_blocks and num_blocks < load.num_blocks:
            return False  # the state is that after all of them
        firsts = [load.num_blocks - len(blocks) for blocks in load.blocks]
        if any(first > self._table.first_seen(group, load.num_tokens) for group, first in enumerate(firsts)):
            return False
        for first, blocks in zip(firsts, load.blocks, strict=True):
            self._release(blocks[num_blocks - first :])
            del blocks[num_blocks - first :]
        load.num_blocks = num_blocks
        return True

    def _cut(self, load: BlockLoad, failed: set[int]) -> None:
        """Leave a load only the blocks before the first failed one. The last ones stay until it is reported."""
        bad = min((place for block, place in load.loaded().items() if block in failed), default=None)
        if bad is not None:
            load.num_tokens = min(load.num_tokens, bad * self._block_size)
            load.request.may_load = False

    def _expire(self) -> list[Request]:
        """Return the requests that have waited too long, and are no longer here. They are computed."""
        if not self._loading:
            return []
        now_s = self._clock()
        late = [load.request for load in self._loading.values() if load.deadline_s <= now_s]
        for request in late:
            logger.warning(
                "request %s has waited %g s for its keys and values: they are computed. Their blocks stay taken until "
                "the KV connector reports the request",
                request.request_id,
                LOAD_TIMEOUT_S,
            )
            request.may_load = False
            self._abandon(request.seq_id)
        return late

    def _take_loads_with(self, blocks: set[int]) -> list[Request]:
        """Give up the loads that have one of these blocks, or whose states are forgotten. Return their requests."""
        found = [load for load in self._loaded if load.state_blocks or not blocks.isdisjoint(load.all_blocks)]
        for load in found:
            self._loaded.remove(load)
            self._let_go(load)
        waiting = [load for load in self._loading.values() if not blocks.isdisjoint(load.all_blocks)]
        for load in waiting:
            self._abandon(load.request.seq_id)
        return [load.request for load in (*found, *waiting)]

    # ---- for tests

    def held_blocks(self) -> Iterable[int]:
        for load in (*self._loading.values(), *self._loaded, *self._abandoned.values()):
            yield from load.all_blocks
        for sent in self._sending.values():
            for blocks in sent:
                yield from blocks

    def requests(self) -> Iterable[Request]:
        yield from (load.request for load in (*self._loading.values(), *self._loaded))
        yield from self._undecided

    def _abandon(self, seq_id: int) -> None:
        load = self._abandoned[seq_id] = self._loading.pop(seq_id)
        self.connector.load_abandoned(load.request)

    def _let_go(self, load: BlockLoad) -> None:
        """Give up a load's references."""
        self._release(load.all_blocks)
        self._states.snapshots.let_go(load.row)

    def _release(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._pool.release(np.array(blocks, np.int32))
