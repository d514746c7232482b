"""What a KV connector has under way for one scheduler: requests that wait for blocks, and blocks that must stay.

A request whose prefix is elsewhere either loads it in its first step, or waits with its blocks until they have arrived.
What was loaded is only published in the prefix cache when no worker has reported a failure, so that no other request
ever uses a block that wasn't loaded. Blocks that something may still write or read keep a reference, whatever becomes
of their request.

Only schedulers with a connector have an object of this class.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from raycore.config.kv_transfer import KVTransferConfig
from raycore.kv_transfer.connector import UNSPECIFIED, SchedulerConnector
from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.prefix_cache import CachedPrefix
from raycore.messages import (
    NO_ADAPTER,
    NO_EXTERNAL_HITS,
    NO_KV_FETCHES,
    ExternalHits,
    KVFetches,
    StepPlan,
    TransferResult,
)
from raycore.scheduler.request import PUBLISHES_ALL, Request
from raycore.scheduler.slots import SlotTable
from raycore.system import time

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""For how long a request waits for its blocks. Connectors have shorter deadlines of their own; this one is for those
that have lost a request."""


_SOURCES = frozenset(ExternalHits.__struct_fields__[1:])


class Offer(NamedTuple):
    """What a connector can bring of a request."""

    num_tokens: int
    """Number of tokens after those that the prefix cache has."""
    is_async: bool


NOTHING_OFFERED = Offer(0, is_async=False)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of a request without a slot, some of which are loaded."""

    request: Request
    blocks: list[int]
    """From the request's first token on. This object has a reference to each."""
    num_cached_blocks: int
    """How many of them were in the prefix cache."""
    num_tokens: int
    """How many of the request's tokens they have, once they have arrived."""
    deadline_s: float

    @property
    def cached(self) -> CachedPrefix:
        """The blocks, in the form in which a request begins with them."""
        return CachedPrefix(len(self.blocks), [self.blocks])


@dataclass(slots=True, eq=False)
class StepLoad:
    """What the first step of a request loads."""

    request: Request
    generation: int
    """That of the request's slot, which becomes another one when the request leaves it."""
    slot: int
    blocks: list[int]
    """Those that are loaded."""
    first: int
    """The index of the first one among the request's blocks."""


class Transfers:
    """Connects a connector to the requests of a scheduler and to their blocks."""

    def __init__(
        self,
        connector: SchedulerConnector,
        config: KVTransferConfig,
        pool: BlockPool,
        slots: SlotTable,
        block_size: int,
        on_identity: list[Callable[[bytes], None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_identity`: gets what takes each identity of the workers' results: see `SchedulerProtocol`."""
        self.connector = connector
        self.is_cache_lost = False
        """Whether the workers have just lost the cache: what requests had in it is of no use to the connector."""
        self.fails_requests = config.kv_load_failure_policy == "fail"
        self._pool = pool
        self._slots = slots
        self._block_size = block_size
        self._clock = clock
        self._loading: dict[int, Load] = {}
        """By seq_id: requests that wait for blocks."""
        self._loaded: deque[Load] = deque()
        """Requests whose blocks have arrived. They are admitted before all that wait."""
        self._abandoned: dict[int, Load] = {}
        """By seq_id: blocks that are still written, and nobody waits for."""
        self._undecided: list[Request] = []
        """Requests of which the connector doesn't know yet what it can bring."""
        self._step_loads: dict[int, list[StepLoad]] = {}
        """By step: what it loads."""
        self._sending: dict[int, deque[list[int]]] = {}
        """By seq_id: blocks that may be read, and have a reference for that."""
        self._stored_by_step: list[tuple[Request, Sequence[bytes], Sequence[int], int]] = []
        """Arguments of `blocks_stored` for blocks that the step which is being planned completes."""
        self._params: list[tuple[int, dict[str, Any]]] = []
        self.hits = NO_EXTERNAL_HITS
        """What the connector has brought."""
        on_identity.append(connector.take_identity)

    # ---- requests that wait

    def add(self, request: Request) -> None:
        """Note a new request."""
        if request.lora_name is None:
            self.connector.on_new_request(request)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are neither running nor in the waiting queue because of transfers."""
        return len(self._loading) + len(self._loaded) + len(self._undecided)

    @property
    def num_promised_slots(self) -> int:
        """Number of requests with blocks and without a slot."""
        return len(self._loading) + len(self._loaded)

    def fetches(self) -> KVFetches:
        """The requests that wait because of transfers, by how far these are."""
        if not self.num_waiting:
            return NO_KV_FETCHES
        return KVFetches(len(self._undecided), len(self._loading), len(self._loaded))

    def count(self, request: Request, num_asked: int, num_brought: int) -> None:
        """Count a request that begins: how many tokens the connector was asked for, and how many it has brought."""
        if request.adapter != NO_ADAPTER:
            return
        by_source: Mapping[str, int] = {}
        if num_brought:
            by_source = self.connector.get_external_cache_hit_sources(request, num_brought)
            if not by_source.keys() <= _SOURCES or sum(by_source.values()) != num_brought:
                by_source = {UNSPECIFIED: num_brought}
        before = self.hits
        changed = {source: getattr(before, source) + number for source, number in by_source.items()}
        self.hits = msgspec.structs.replace(before, num_queries=before.num_queries + num_asked, **changed)

    def offer(self, request: Request, num_cached_blocks: int) -> Offer | None:
        """Return what the connector can bring of a waiting request. None: it isn't known yet."""
        if not request.may_load or request.adapter != NO_ADAPTER or not request.reads_prefix_cache:
            return NOTHING_OFFERED
        if request.seq_id in self._abandoned:
            return NOTHING_OFFERED  # reports name requests, so there is one load of each at a time
        size = self._block_size
        request.extend_digests(request.tokens, (len(request.tokens) - 1) // size, size)
        num_cached = num_cached_blocks * size
        found, is_async = self.connector.get_num_new_matched_tokens(request, num_cached)
        if found is None:
            return None
        # a step samples after the last token, so that one is always computed
        num_tokens = min(found, len(request.tokens) - 1 - num_cached)
        if num_tokens < found or not is_async:
            num_tokens -= num_tokens % size  # connectors load whole blocks, unless they have offered a part of one
        return Offer(num_tokens, is_async) if num_tokens > 0 else NOTHING_OFFERED

    def set_aside(self, request: Request) -> None:
        """Keep a request, which has left the waiting queue, until the connector knows more."""
        self._undecided.append(request)

    def take_undecided(self) -> list[Request]:
        """Return the requests that were set aside, and forget them."""
        requests, self._undecided = self._undecided, []
        return requests

    def begin_load(self, request: Request, cached: CachedPrefix, offer: Offer) -> None:
        """Take blocks for a request that has left the waiting queue, and have the rest of them loaded."""
        held = cached.blocks[0] if cached.num_blocks else []
        num_tokens = cached.num_blocks * self._block_size + offer.num_tokens
        if held:
            self._pool.share(held)
        taken = self._pool.take(-(-num_tokens // self._block_size) - len(held))
        load = Load(request, [*held, *taken], len(held), num_tokens, self._clock() + LOAD_TIMEOUT_S)
        self._loading[request.seq_id] = load
        self.connector.update_state_after_alloc(request, load.blocks, offer.num_tokens)

    def num_promised_blocks(self, request: Request, num_blocks_for: Callable[[int], int]) -> int:
        """Return how many more blocks requests with blocks and without a slot need, without those of `request`."""
        return sum(
            num_blocks_for(len(load.request.tokens)) - len(load.blocks)
            for load in (*self._loading.values(), *self._loaded)
            if load.request is not request
        )

    def next_loaded(self) -> Load | None:
        """Return the next request whose blocks have arrived."""
        return self._loaded[0] if self._loaded else None

    def begin_loaded(self) -> None:
        """Note that the next one has its slot, which has references to its blocks."""
        self._release(self._loaded.popleft().blocks)

    def begin_step_load(
        self, step: int, request: Request, blocks: list[int], num_cached_blocks: int, num_tokens: int
    ) -> None:
        """Have a request's first step load blocks. Publishing them waits for the step's result.

        Args:
            blocks: the request's blocks in its slot.
            num_tokens: how many tokens are loaded, after those that the prefix cache had. They fill blocks.
        """
        loaded = blocks[num_cached_blocks : num_cached_blocks + num_tokens // self._block_size]
        generation = int(self._slots.generation[request.slot])
        request.max_published_blocks = num_cached_blocks
        load = StepLoad(request, generation, request.slot, loaded, num_cached_blocks)
        self._step_loads.setdefault(step, []).append(load)
        self.connector.update_state_after_alloc(request, blocks, num_tokens)

    # ---- requests that leave

    def discard(self, request: Request) -> bool:
        """Forget a request without a slot, because it was aborted. Returns whether it waited here."""
        is_here = request in self._undecided
        if is_here:
            self._undecided.remove(request)
        elif request.seq_id in self._loading:
            is_here = True
            self._abandon(request.seq_id)
        else:
            for load in self._loaded:
                if load.request is request:
                    is_here = True
                    self._loaded.remove(load)
                    self._release(load.blocks)
                    break
        self._finish(request, [])
        return is_here

    def leave(self, request: Request, blocks: list[int], *, is_over: bool) -> None:
        """Note that a request leaves its slot, whose references to the blocks are given up after this.

        `is_over`: whether it has ended, instead of being preempted.
        """
        request.max_published_blocks = PUBLISHES_ALL
        if request.adapter != NO_ADAPTER or self.is_cache_lost:
            return
        is_kept = self._finish(request, blocks) if is_over else self.connector.request_preempted(request, blocks)
        if is_kept and blocks:
            self._pool.share(blocks)
            self._sending.setdefault(request.seq_id, deque()).append(blocks)

    def _finish(self, request: Request, blocks: list[int]) -> bool:
        if request.lora_name is not None:
            return False
        if not blocks:
            request.num_computed_tokens = 0  # also of one that was preempted before
        is_kept, params = self.connector.request_finished(request, blocks)
        if params is not None:
            self._params.append((request.seq_id, params))
        return is_kept

    def take_params(self) -> list[tuple[int, dict[str, Any]]]:
        """Return what clients get of requests that have ended: (seq_id, parameters)."""
        params, self._params = self._params, []
        return params

    def take_back(self) -> bool:
        """Take back the blocks of a send that the connector gives up, because a request lacks blocks.

        Returns: whether there was one.
        """
        while self._sending and (seq_id := self.connector.give_up_send()) is not None:
            sent = self._sending.pop(seq_id, None)
            if sent is not None:
                for blocks in sent:
                    self._release(blocks)
                return True
        return False

    def give_up_loads(self) -> list[Request]:
        """Give up all blocks of requests without a slot, whose content is no longer wanted. Return these requests.

        What is still written keeps its blocks.
        """
        requests = [load.request for load in (*self._loading.values(), *self._loaded)]
        for seq_id in list(self._loading):
            self._abandon(seq_id)
        while self._loaded:
            self._release(self._loaded.popleft().blocks)
        self._stored_by_step.clear()
        return requests

    def start_over(self) -> list[Request]:
        """Forget everything: the workers have given up the cache, so that nothing writes or reads blocks.

        Until the caller resets `is_cache_lost`, requests that leave their slots, and blocks that are published, don't
        count. Returns the requests that waited.
        """
        self.is_cache_lost = True
        requests = [*self.give_up_loads(), *self.take_undecided()]
        for load in self._abandoned.values():
            self._release(load.blocks)
        for sent in self._sending.values():
            for blocks in sent:
                self._release(blocks)
        self._abandoned.clear()
        self._sending.clear()
        self._step_loads.clear()
        self.connector.cache_lost()
        return requests

    # ---- steps

    def wants_step(self) -> bool:
        """Whether workers have to be asked, or told something, although there is nothing to compute."""
        is_waiting = self._loading or self._abandoned or self._sending or self._undecided
        return bool(is_waiting) or self.connector.has_pending_push_work()

    def note_stored(
        self, request: Request, digests: Sequence[bytes], blocks: Sequence[int], first: int, *, is_planned: bool
    ) -> None:
        """Note that blocks of a request were published.

        `is_planned`: whether their content is only complete after the step that is being planned.
        """
        if request.adapter != NO_ADAPTER or self.is_cache_lost:
            return
        if is_planned:
            self._stored_by_step.append((request, digests, blocks, first))
        else:
            self.connector.blocks_stored(request, digests, blocks, first)

    def complete(self, plan: StepPlan) -> None:
        """Add to a plan, which is otherwise complete, what workers' connectors are told."""
        plan.transfer = self.connector.build_connector_meta(plan)
        stored, self._stored_by_step = self._stored_by_step, []
        for arguments in stored:
            self.connector.blocks_stored(*arguments)

    def settle(self, step: int, failed_blocks: Collection[int]) -> tuple[list[StepLoad], list[Request], set[int]]:
        """Take in what a step has loaded. Requests that have left their slots since don't count.

        Returns: the loads that have arrived, whose blocks may be published; the requests that lack blocks; and
        the failed blocks that aren't of loads, which were right before.
        """
        others = set(failed_blocks)
        arrived: list[StepLoad] = []
        failures: list[Request] = []
        for load in self._step_loads.pop(step, ()):
            bad = next((index for index, block in enumerate(load.blocks) if block in others), None)
            others.difference_update(load.blocks)
            if self._slots.generation[load.slot] != load.generation:
                continue
            load.request.max_published_blocks = PUBLISHES_ALL if bad is None else load.first + bad
            if bad is None:
                arrived.append(load)
            else:
                load.request.may_load = False
                failures.append(load.request)
        for load in (*self._loading.values(), *self._abandoned.values()):
            others.difference_update(load.blocks[load.num_cached_blocks :])
        return arrived, failures, others

    def take_in(self, result: TransferResult) -> list[Request]:
        """Apply what workers report of asynchronous transfers.

        Returns: with `kv_load_failure_policy="fail"`, the requests that fail, which are no longer here.
        """
        failed = set(result.failed_blocks)
        failing: list[Request] = []
        for load in self._loading.values() if failed else ():
            self._cut(load, failed)
        for seq_id in result.received:
            if seq_id in self._abandoned:
                self._release(self._abandoned.pop(seq_id).blocks)
            elif (load := self._loading.pop(seq_id, None)) is not None:
                if self.fails_requests and not load.request.may_load:
                    self._release(load.blocks)
                    self._finish(load.request, [])
                    failing.append(load.request)
                else:
                    self._trim(load)
                    self._loaded.append(load)
        for seq_id in result.sent:
            sent = self._sending.get(seq_id)
            if sent is not None:
                self._release(sent.popleft())
                if not sent:
                    del self._sending[seq_id]
        self.connector.update_connector_output(result)
        return failing

    def _trim(self, load: Load) -> None:
        """Give back the blocks of a load that has arrived which weren't loaded after all."""
        num_blocks = -(-load.num_tokens // self._block_size)
        self._release(load.blocks[num_blocks:])
        del load.blocks[num_blocks:]

    def _cut(self, load: Load, failed: set[int]) -> None:
        """Leave a load only the blocks before the first failed one. The last ones stay until it is reported."""
        bad = next((index for index, block in enumerate(load.blocks) if block in failed), None)
        if bad is not None:
            load.num_tokens = min(load.num_tokens, bad * self._block_size)
            load.request.may_load = False

    def expire(self) -> list[Request]:
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

    def with_blocks(self, blocks: set[int]) -> list[Request]:
        """Give up the loads that have one of these blocks, and return their requests."""
        found = [load for load in self._loaded if not blocks.isdisjoint(load.blocks)]
        for load in found:
            self._loaded.remove(load)
            self._release(load.blocks)
        waiting = [load for load in self._loading.values() if not blocks.isdisjoint(load.blocks)]
        for load in waiting:
            self._abandon(load.request.seq_id)
        return [load.request for load in (*found, *waiting)]

    # ---- for tests

    def held_blocks(self) -> Iterator[int]:
        """Yield the blocks to which this object has references, as often as it has them."""
        for load in (*self._loading.values(), *self._loaded, *self._abandoned.values()):
            yield from load.blocks
        for sent in self._sending.values():
            for blocks in sent:
                yield from blocks

    def requests(self) -> Iterable[Request]:
        """The requests that wait here."""
        yield from (load.request for load in (*self._loading.values(), *self._loaded))
        yield from self._undecided

    def _abandon(self, seq_id: int) -> None:
        load = self._abandoned[seq_id] = self._loading.pop(seq_id)
        self.connector.load_abandoned(load.request)

    def _release(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._pool.release(np.array(blocks, np.int32))
