"""What the next step computes, and what a step's result means.

There is no prefill and no decode: every request has tokens known and tokens computed, and a step lets the second catch
up with the first under a budget of tokens. Running requests go first, those with one token to compute before the
others; waiting ones get what is left, slots, blocks and budget permitting. When the running requests need more blocks
than there are, the least urgent loses its own and starts over later.

Plans may be made ahead of results. A decode in flight is taken to give one token; whatever else it turns out to be is
put right by ignoring the results that were planned for a request that has left its slot. That holds for a preempted
request too: tokens in flight are forgotten, nobody has seen them, and they are drawn again with the same random
numbers. Workers execute plans in order, so a block may change hands as soon as its request is gone, whatever is in
flight.

Knows nothing of clients, time, or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from raycore.config import CacheConfig, SchedulerConfig
from raycore.errors import InvalidRequest
from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.prefix_cache import PrefixCache
from raycore.messages import EngineRequest, FinishedRequest, LoadView, StepPlan, StepResult, client_of
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.policy import WaitingQueue
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.request import Request, RequestLimits
from raycore.scheduler.slots import DECODE, LAST, PREFILL, SlotTable
from raycore.scheduler.step_builder import Chunk, InFlight, StepBuilder


class Scheduler:
    """The scheduler of one data-parallel rank.

    Args:
        num_blocks: blocks of the KV cache, on every worker.
        vocab_size: token ids are below it.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, num_blocks: int, vocab_size: int) -> None:
        assert config.max_num_batched_tokens >= config.max_num_seqs, "every running request gets a token in each step"
        self._config = config
        self._block_size = cache.block_size
        self._limits = RequestLimits(vocab_size, config.max_model_len, cache.block_size, num_blocks)
        prefix_cache = PrefixCache() if cache.enable_prefix_caching else None
        self._pool = BlockPool(num_blocks, prefix_cache)
        self._blocks = BlockTable(config.max_num_seqs, config.max_model_len, cache.block_size, self._pool)
        self._slots = SlotTable(config.max_num_seqs, config.max_model_len, vocab_size)
        self._prefixes = Prefixes(prefix_cache, self._slots, self._blocks) if prefix_cache is not None else None
        self._waiting = WaitingQueue(config.policy)
        self._held: dict[int, Request] = {}
        """Those that wait for something else before they may wait for a slot."""
        self._requests: dict[int, Request] = {}
        self._prefills: list[Request] = []
        """The requests in PREFILL, in the order in which they got their slots."""
        self._in_flight: deque[InFlight] = deque()
        self._freed_slots: list[int] = []
        """Slots whose requests have left since the last plan."""
        self._num_submitted = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._refused: tuple[Request, int] | None = None
        """(head of the queue, free blocks) when there were too few: no need to look again until either changes."""

    # ---- requests come and go

    def submit(self, request: EngineRequest, *, is_held: bool = False) -> None:
        """Queue a request; one that `is_held`, only with `release`.

        Raises:
            RequestTooLarge: it could never run; the message has the numbers.
            InvalidRequest: an empty prompt, a token that isn't in the vocabulary, a seq_id in use.
        """
        if request.seq_id in self._requests:
            raise InvalidRequest(f"request {request.request_id}: seq_id {request.seq_id} belongs to a running request")
        admitted = self._limits.admit(request, self._num_submitted)
        self._num_submitted += 1
        self._requests[request.seq_id] = admitted
        if is_held:
            self._held[request.seq_id] = admitted
        else:
            self._waiting.push(admitted)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Queue requests that were held, as if they had been queued when they came."""
        for seq_id in seq_ids:
            self._waiting.push(self._held.pop(seq_id))

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End requests without a further output. Sequence ids that are not there, or not any more, are ignored."""
        for seq_id in seq_ids:
            request = self._requests.pop(seq_id, None)
            if request is None:
                continue
            request.is_aborted = True
            if self._held.pop(seq_id, None) is not None:
                continue
            if request.slot < 0:
                self._waiting.discard(request)
            else:
                self._vacate(request)

    def seq_ids_of(self, client: int) -> list[int]:
        """The requests of one client that wait or run."""
        return [seq_id for seq_id in self._requests if client_of(seq_id) == client]

    def seq_ids_in_flight(self, step: int) -> list[int]:
        """The requests of a plan that has no result yet, without those that have left since."""
        for planned in self._in_flight:
            if planned.step == step:
                requests = (planned.live_request(row, self._slots) for row in range(len(planned.batch.slots)))
                return [request.seq_id for request in requests if request is not None]
        return []

    def has_work(self) -> bool:
        """Whether any request that isn't held waits or runs."""
        return len(self._requests) > len(self._held)

    def load(self) -> LoadView:
        """What runs and waits now, and what has been counted since the start."""
        return LoadView(
            len(self._waiting) + len(self._held),
            self._slots.num_running,
            self._pool.usage,
            self._num_preemptions,
            self._num_queried_tokens,
            self._num_cached_tokens,
            len(self._held),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while any request holds blocks."""
        if self._slots.num_running:
            return False
        self._pool.forget()
        return True

    # ---- schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before a result or a request comes in."""
        step, has_preempted = self._fit_running()
        self._advance_decodes(step)
        budget = self._config.max_num_batched_tokens - len(step.decodes.slots)
        for chunk in step.chunks:
            budget -= chunk.num_tokens
            self._advance_chunk(chunk, step)
        # a victim would be the first to be admitted, and would take back what it just gave up
        if not has_preempted:
            self._admit_waiting(step, budget)
        if step.is_empty:
            return None
        plan, in_flight = step.finish(self._num_steps, self._freed_slots, self._slots)
        self._num_steps += 1
        self._freed_slots = []
        self._in_flight.append(in_flight)
        return plan

    def _fit_running(self) -> tuple[StepBuilder, bool]:
        """What the running requests compute, after preempting as many as it takes to have blocks for it."""
        has_preempted = False
        while True:
            step = StepBuilder(self._slots.decodes())
            slots = step.decodes.slots
            is_full = self._slots.computed[slots] >= self._blocks.capacity[slots]
            step.block_slots = slots[is_full.nonzero()[0]].tolist()
            needed = len(step.block_slots)
            if self._prefills:
                step.chunks = self._running_chunks(self._config.max_num_batched_tokens - len(slots))
                needed += sum(self._num_missing_blocks(chunk) for chunk in step.chunks)
            if needed <= self._pool.num_free:
                return step, has_preempted
            self._preempt_one()
            has_preempted = True

    def _running_chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self._prefills:
            if not budget:
                break
            chunk = self._chunk(request, int(self._slots.computed[request.slot]), len(request.tokens), budget)
            budget -= chunk.num_tokens
            chunks.append(chunk)
        return chunks

    def _chunk(self, request: Request, num_computed: int, num_known: int, budget: int) -> Chunk:
        remaining = num_known - num_computed
        longest = self._config.long_prefill_token_threshold or remaining
        num_tokens = min(remaining, longest, budget)
        return Chunk(request, num_tokens, num_tokens == remaining)

    def _num_missing_blocks(self, chunk: Chunk) -> int:
        slot = chunk.request.slot
        return self._blocks.num_missing(slot, int(self._slots.computed[slot]) + chunk.num_tokens)

    def _preempt_one(self) -> None:
        """Send the least urgent request back to the queue.

        One whose last token is in flight is spared: its blocks come free by themselves.
        """
        candidates = [request for request in self._slots.running() if self._slots.phase[request.slot] != LAST]
        victim = max(candidates, key=self._waiting.urgency)
        self._num_preemptions += 1
        self._vacate(victim)
        self._waiting.push(victim)

    def _advance_decodes(self, step: StepBuilder) -> None:
        """One token for each decode, and a block for each that starts on one."""
        table, batch = self._slots, step.decodes
        if step.block_slots:
            # what they filled before, they can show now
            self._publish(step.block_slots)
            step.block_ids = self._blocks.grow_each(np.array(step.block_slots)).tolist()
        num_computed = table.computed[batch.slots] + 1
        table.computed[batch.slots] = num_computed
        at_end = (num_computed + 1 >= batch.max_tokens).nonzero()[0]
        if len(at_end):
            table.set_phase(batch.slots[at_end], LAST)

    def _advance_chunk(self, chunk: Chunk, step: StepBuilder) -> None:
        """Tokens for a request in PREFILL, which has its blocks or will have them by this."""
        slot = chunk.request.slot
        computed = int(self._slots.computed[slot]) + chunk.num_tokens
        added = self._blocks.grow(slot, computed)
        step.block_slots += [slot] * len(added)
        step.block_ids += added
        self._slots.computed[slot] = computed
        if chunk.is_final:
            self._prefills.remove(chunk.request)
            self._slots.set_phase(slot, LAST if computed + 1 == chunk.request.max_tokens else DECODE)
        self._publish([slot])

    def _admit_waiting(self, step: StepBuilder, budget: int) -> None:
        """Start waiting requests, in order, until one finds no budget, no slot, or too few blocks."""
        while budget and len(self._waiting) and self._slots.num_free:
            request = self._waiting.peek()
            if self._refused == (request, self._pool.num_free):
                return
            cached = self._prefixes.find(request) if self._prefixes is not None else []
            if not self._has_blocks_for(request, cached):
                self._refused = (request, self._pool.num_free)
                return
            self._waiting.pop()
            chunk = self._start(request, cached, budget, step)
            budget -= chunk.num_tokens

    def _has_blocks_for(self, request: Request, cached: list[int]) -> bool:
        """Whether all its known tokens would fit beside the requests that run, and leave each of these a block to grow.

        Admitting it for its first chunk alone would let it take the blocks that an earlier prompt's next chunks need;
        and without room to grow it would be preempted within steps, because it is the one that came last.
        """
        missing = -(-len(request.tokens) // self._block_size) - len(cached)
        promised = sum(self._blocks.num_missing(other.slot, len(other.tokens)) for other in self._prefills)
        spoken_for = promised + self._slots.num_running + self._pool.num_free_among(cached)
        return missing + spoken_for <= self._pool.num_free

    def _start(self, request: Request, cached: list[int], budget: int, step: StepBuilder) -> Chunk:
        num_cached = len(cached) * self._block_size
        chunk = self._chunk(request, num_cached, len(request.tokens), budget)
        self._slots.enter(request, num_cached)
        self._blocks.begin(request.slot, cached)
        self._prefills.append(request)
        request.num_published_blocks = len(cached)
        # the first blocks travel with the request, the step's lists are for those that follow
        self._blocks.grow(request.slot, num_cached + chunk.num_tokens)
        step.new_requests.append(request.for_workers(num_cached, self._blocks.row(request.slot)))
        step.chunks.append(chunk)
        self._advance_chunk(chunk, step)
        if not request.was_started:
            request.was_started = True
            if self._prefixes is not None and request.reads_prefix_cache:
                self._num_queried_tokens += len(request.tokens)
                self._num_cached_tokens += num_cached
            step.started.append((request, num_cached))
        return chunk

    def _publish(self, slots: list[int]) -> None:
        if self._prefixes is not None:
            self._prefixes.publish(slots)

    def _vacate(self, request: Request) -> None:
        """Take slot and blocks away from a running request."""
        slot = request.slot
        self._publish([slot])
        if self._slots.phase[slot] == PREFILL:
            self._prefills.remove(request)
        self._slots.leave(request)
        self._blocks.end(slot)
        self._freed_slots.append(slot)

    # ---- update

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take in the result of the oldest plan in flight."""
        step = self._in_flight.popleft()
        assert step.step == plan.step == result.step, (step.step, plan.step, result.step)
        table, batch = self._slots, step.batch
        token_ids = np.frombuffer(result.token_ids, np.int32)
        rows = step.live_rows(table)
        if rows is None:
            outputs = StepOutputs(seq_ids=batch.seq_ids, token_ids=token_ids, flush_interval_s=batch.flush_interval_s)
            slots, max_tokens = batch.slots, batch.max_tokens
        else:
            token_ids = token_ids[rows]
            slots, max_tokens = batch.slots[rows], batch.max_tokens[rows]
            flush_interval_s = float(table.flush_interval_s[slots].min(initial=np.inf))
            outputs = StepOutputs(seq_ids=batch.seq_ids[rows], token_ids=token_ids, flush_interval_s=flush_interval_s)
        if step.started or result.logprobs or result.prompt_logprobs:
            step.add_extras(outputs, result, rows, table)
        failures = step.failures(result, rows) if result.failed else {}
        received = table.received[slots]
        table.tokens[slots, received] = token_ids
        received += 1
        table.received[slots] = received
        may_end = ((table.num_stoppers[token_ids] > 0) | (received >= max_tokens)).nonzero()[0]
        if failures:
            outputs.finished = self._fail(failures, slots)
            may_end = may_end[~np.isin(may_end, list(failures))]
        if len(may_end):
            outputs.finished += self._finish(may_end, slots, token_ids, received)
        return outputs

    def _finish(
        self,
        candidates: NDArray[np.int64],
        slots: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        received: NDArray[np.int64],
    ) -> list[FinishedRequest]:
        finished: list[FinishedRequest] = []
        for index in candidates.tolist():
            request = self._slots.requests[int(slots[index])]
            assert request is not None
            end = request.end_of(int(token_ids[index]), int(received[index]))
            if end is not None:
                finished.append(FinishedRequest(request.seq_id, *end))
                self._drop(request)
        return finished

    def _fail(self, failures: dict[int, str], slots: NDArray[np.int64]) -> list[FinishedRequest]:
        finished: list[FinishedRequest] = []
        for index, why in failures.items():
            request = self._slots.requests[int(slots[index])]
            assert request is not None
            finished.append(FinishedRequest(request.seq_id, "failed", why))
            self._drop(request)
        return finished

    def _drop(self, request: Request) -> None:
        self._vacate(request)
        del self._requests[request.seq_id]

    def check_integrity(self) -> None:
        """Assert our own invariants; for tests, and for when there is nothing else to do."""
        self._slots.check_integrity()
        self._blocks.check_integrity()
        running = self._slots.running()
        assert len(running) + len(self._waiting) + len(self._held) == len(self._requests)
        assert all(self._requests[request.seq_id] is request for request in running)
        assert {id(request) for request in self._prefills} == {
            id(request) for request in running if self._slots.phase[request.slot] == PREFILL
        }
        for request in running:
            assert self._blocks.capacity[request.slot] >= self._slots.computed[request.slot]
