"""Plans steps, and applies their results to the requests.

There are no separate prefill and decode steps. Every request has known tokens (prompt and output) and computed tokens
(known tokens whose keys and values are in the KV cache). Each step computes known tokens of requests, within a token
budget. Running requests with exactly one token to compute (decodes) are planned first, then other running requests. The
rest of the budget goes to waiting requests, while there are free slots and blocks. While running requests need more
blocks than are free, the least urgent running request is preempted: it loses its blocks, waits again, and is computed
again later.

A step can be planned before the results of earlier steps arrive, on the assumption that each decode in flight gives one
token. If workers make drafts themselves, it also assumes that these are right. Only workers then know where a request's
next step begins, and the number of computed tokens is corrected when the result arrives. Only a request whose output a
part needs, as for a grammar, waits for its own last token. If a request has left its slot when a result arrives
(finished, aborted or preempted), the result for this request is ignored. When a request is preempted, its tokens in
flight are lost. No client has seen them, and they are sampled again with the same random numbers. Workers execute plans
in order, so the blocks of a request that has left its slot can be reused at once, even while steps that use them are in
flight.

If steps in flight are in different stages of a pipeline, running decodes take turns: each step gets a part of them and
of prompts' tokens, so that all stages have work. A decode whose last token is still being computed waits for a later
step, if there is anything else to compute.

What else a request may have, such as images, drafts, or blocks that live elsewhere, is in parts (see `part`). This
module knows nothing of them, nor of connections, time, or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from raycore.cache_layout import CacheLayout
from raycore.config import CacheConfig, SchedulerConfig
from raycore.errors import InvalidRequest
from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.prefix_cache import PrefixCache
from raycore.messages import EngineRequest, FinishedRequest, LoadView, StepPlan, StepResult, client_of
from raycore.scheduler.block_needs import BlockNeeds
from raycore.scheduler.chunks import Chunks
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.part import Hooks, SchedulerPart, SchedulerView, Start, Verdict
from raycore.scheduler.policy import WaitingQueue
from raycore.scheduler.request import Request, RequestLimits
from raycore.scheduler.slots import DECODE, LAST, PREFILL, STALLED, SlotTable
from raycore.scheduler.step_builder import Chunk, InFlight, StepBuilder
from raycore.scheduler.turns import Turns


class Scheduler:
    """The scheduler of one data-parallel rank.

    Args:
        num_blocks: number of KV cache blocks on every worker.
        vocab_size: size of the model's vocabulary. Token ids are smaller.
        tells_tokens: whether plans tell the workers which tokens they compute. A request then waits for its last token
            before the next one is planned.
        num_turns: the number of steps that running decodes take turns in. A step then has at most 1 of `num_turns`
            equal parts of the running requests as decodes, and a part of the prompts' tokens.
        layout: the groups of layers that share the blocks. None: there is one, which keeps all tokens.
        waits_for_output: whether each request waits for its last token before the next one is planned.
        parts: what the engine has besides. Each belongs to one scheduler. `Prefixes` is the prefix cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        vocab_size: int,
        *,
        tells_tokens: bool = False,
        num_turns: int = 1,
        layout: CacheLayout | None = None,
        waits_for_output: bool = False,
        parts: Sequence[SchedulerPart] = (),
    ) -> None:
        assert config.max_num_batched_tokens >= config.max_num_seqs, "every running request gets a token in each step"
        self._config = config
        self._tells_tokens = tells_tokens
        self._block_size = cache.block_size
        windows = [None] if layout is None else layout.windows
        self.parts = sorted(parts, key=lambda part: part.order)
        """In the order in which their hooks are called."""
        self._hooks = Hooks(self.parts)
        checked = {name: value for part in self.parts for name, value in part.request_limits().items()}
        sizes = config.max_model_len, cache.block_size, num_blocks
        self._limits = RequestLimits(vocab_size, *sizes, layout, **checked)
        self._pool = BlockPool(num_blocks, PrefixCache(cache.block_size, windows))
        self._blocks = BlockTable(config.max_num_seqs, config.max_model_len, cache.block_size, self._pool, windows)
        waits = waits_for_output or tells_tokens
        self._slots = SlotTable(config.max_num_seqs, config.max_model_len, vocab_size, waits_for_output=waits)
        divides_prompts = all(part.divides_prompts for part in self.parts)
        most = config.max_num_batched_tokens
        self._turns = Turns(num_turns, self._slots, most, divides_prompts=divides_prompts)
        self._chunks = Chunks(self._slots, config.long_prefill_token_threshold, self._hooks)
        self._needs = BlockNeeds(self._limits, self._slots, self._blocks, self._hooks)
        self._waiting = WaitingQueue(config.policy)
        self._held: dict[int, Request] = {}
        """Requests, by seq_id, that were submitted with `is_held` and are not in the waiting queue yet."""
        self._set_aside: dict[int, Request] = {}
        """By seq_id: requests that parts keep, because they may not begin yet."""
        self._requests: dict[int, Request] = {}
        self._prefills: list[Request] = []
        """The running requests in the phase PREFILL (see `slots`), in the order in which they got their slots."""
        self._in_flight: deque[InFlight] = deque()
        self._freed_slots: list[int] = []
        """Slots vacated since the last plan."""
        self._identity = b""
        """As in `take_identity`."""
        self._num_submitted = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._preempted: list[tuple[int]] = []
        """(seq_id,) for each preemption that clients haven't been told of."""
        self._failed: list[FinishedRequest] = []
        """Requests that parts have ended, and clients haven't been told of."""
        self._refused: tuple[Request, int] | None = None
        """(the most urgent waiting request, free blocks) when there were too few blocks for that request. While neither
        changes, the request isn't checked again."""
        seen = self._slots, self._blocks, self._pool, self._hooks, self._limits.num_blocks_for
        done = self._preempt, self._wait_again, self._fail, self._publish, self._check_again
        view = SchedulerView(config, *seen, *done)
        for part in self.parts:
            part.attach(view)

    # ---- requests come and go

    def submit(self, request: EngineRequest, *, is_held: bool = False) -> None:
        """Add a request to the waiting queue. With `is_held`, hold it back until `release` is called.

        Raises:
            RequestTooLarge: the request could never run. The message has the numbers.
            InvalidRequest: the request is invalid (see `RequestLimits.admit`), or its seq_id is in use.
        """
        if request.seq_id in self._requests:
            raise InvalidRequest(f"request {request.request_id}: seq_id {request.seq_id} belongs to a running request")
        admitted = self._limits.admit(request, self._num_submitted)
        self._num_submitted += 1
        self._requests[request.seq_id] = admitted
        for submitted in self._hooks.submitted:
            submitted(admitted)
        if is_held:
            self._held[request.seq_id] = admitted
        else:
            self._waiting.push(admitted)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Add requests that were held back to the waiting queue, ordered as if they had not been held."""
        for seq_id in seq_ids:
            self._waiting.push(self._held.pop(seq_id))

    def give_adapter(self, seq_id: int, adapter_slot: int, load_id: int) -> None:
        """Note where the workers hold the adapter of a request that is held back, and which load of it."""
        self._held[seq_id].set_adapter(adapter_slot, load_id)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End requests without further output. Unknown seq_ids are ignored."""
        for seq_id in seq_ids:
            request = self._requests.pop(seq_id, None)
            if request is None:
                continue
            request.is_aborted = True
            waits_elsewhere = seq_id in self._held or seq_id in self._set_aside
            self._held.pop(seq_id, None)
            self._set_aside.pop(seq_id, None)
            if request.slot >= 0:
                self._vacate(request, is_over=True)
                continue
            for aborted in self._hooks.aborted:
                aborted(request)
            if not waits_elsewhere:
                self._waiting.discard(request)

    def seq_ids_of(self, client: int) -> list[int]:
        """Return the seq_ids of all requests of the client with the index `client`."""
        return [seq_id for seq_id in self._requests if client_of(seq_id) == client]

    def seq_ids_in_flight(self, step: int) -> list[int]:
        """Return the seq_ids of the requests in the plan of `step`, without those that have left their slots since.

        Empty if `step` is not in flight.
        """
        return [seq_id for each in self._in_flight if each.step == step for seq_id in each.seq_ids(self._slots)]

    def has_work(self) -> bool:
        """Whether any request is waiting or running, or blocks are moved. Requests that are held back don't count."""
        return len(self._requests) > len(self._held) or self._hooks.want_step()

    def load(self) -> LoadView:
        """Return the current load, and counters since the start."""
        numbers: dict[str, Any] = {}
        for load in self._hooks.load:
            numbers |= load()
        num_deferred = len(self._held) + len(self._set_aside)
        return LoadView(
            len(self._waiting) + num_deferred,
            self._slots.num_running,
            self._pool.usage,
            self._num_preemptions,
            num_deferred=num_deferred,
            **numbers,
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clear the prefix cache. Does nothing and returns False if a request is running.

        With `reset_running_requests`, running requests are preempted instead.
        """
        if reset_running_requests:
            for request in self._slots.running():
                self._preempt(request)
        elif self._slots.num_running:
            return False
        for clearing in self._hooks.clearing:
            clearing()
        self._pool.forget()
        self._refused = None
        return True

    def reset_encoder_cache(self) -> None:
        """Have the workers drop the embeddings of all features. Requests that have begun to use some are preempted."""
        for drop in self._hooks.drop_embeddings:
            drop()

    def take_identity(self, identity: bytes) -> None:
        """See `SchedulerProtocol`."""
        self._identity = identity
        self._refused = None
        for take in self._hooks.identity_taken:
            take(identity)

    def start_over(self) -> None:
        """Preempt all running requests and clear the prefix cache, because workers have lost the cache and all slots.

        No step may be in flight.
        """
        assert not self._in_flight
        for cache_lost in self._hooks.cache_lost:
            cache_lost()
        self.reset_prefix_cache(reset_running_requests=True)
        self.reset_encoder_cache()
        self._freed_slots = []  # the workers' new slots are free

    # ---- schedule

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns None if there is nothing to compute until a result or a request arrives."""
        step = self._build_step()
        if step.is_empty and self._turns.number > 1:
            step = self._build_step(only_due=False)
        if step.is_empty and not self._hooks.want_step():
            return None
        if self._turns.number > 1:
            step.note_turns(self._num_steps, self._slots)
        plan, in_flight = step.finish(self._num_steps, self._freed_slots, self._slots, tells_tokens=self._tells_tokens)
        for finish in self._hooks.plan_finished:
            finish(plan)
        self._num_steps += 1
        self._freed_slots = []
        self._in_flight.append(in_flight)
        return plan

    def _build_step(self, *, only_due: bool = True) -> StepBuilder:
        """Build the next step. `only_due`: leave out decodes whose last tokens are still being computed by stages."""
        most = self._turns.max_prompt_tokens(self._waiting.num_tokens, self._prefills)
        step, has_preempted = self._fit_running(most, only_due=only_due)
        self._advance_decodes(step)
        budget = min(most, self._config.max_num_batched_tokens - len(step.decodes.slots) - step.num_drafts)
        for chunk in step.chunks:
            budget -= chunk.num_tokens
            self._advance_chunk(chunk, step)
        # a request that was just preempted could be admitted at once, and take back the blocks that it has lost
        if not has_preempted:
            self._admit_waiting(step, budget)
        return step

    def _fit_running(self, most: int, *, only_due: bool) -> tuple[StepBuilder, bool]:
        """Begin the next step with the running requests. While there are too few free blocks for them, preempt
        requests.

        Args:
            most: maximum number of tokens of prompts.
            only_due: see `_build_step`.

        Returns: the step, and whether a request was preempted.
        """
        if self._blocks.frees_blocks:
            self._release_unseen()
        has_preempted = False
        while True:
            for begin_try in self._hooks.begin_try:
                begin_try()
            step = StepBuilder(self._turns.next_decodes(self._num_steps, only_due=only_due))
            slots = step.decodes.slots
            is_full = self._slots.computed[slots] >= self._blocks.capacity[slots]
            step.block_slots = slots[is_full.nonzero()[0]].tolist()
            needed = len(step.block_slots) * self._blocks.num_groups
            if self._prefills:
                step.chunks = self._chunks.of_running(
                    self._prefills, min(most, self._config.max_num_batched_tokens - len(slots))
                )
                needed += step.num_missing_blocks(self._slots, self._blocks)
            if needed <= self._pool.num_free:
                return step, has_preempted
            if self._hooks.take_back_any():
                continue
            self._preempt_one()
            has_preempted = True

    def _release_unseen(self) -> None:
        """Give back the blocks that no token sees which is planned from now on, whichever drafts turn out to be wrong.

        Requests that wait for a result keep theirs until then.
        """
        table = self._slots
        slots = table.decodes().slots
        if self._prefills:
            slots = np.concatenate([slots, [request.slot for request in self._prefills]])
        self._blocks.release_unseen(slots, table.least_computed(slots))

    def take_turns(self, num_turns: int) -> None:
        """Let running decodes take turns in so many steps from now on."""
        self._turns.number = num_turns

    def _preempt_one(self) -> None:
        """Preempt the least urgent running request, and put it back in the waiting queue.

        Requests whose last token is in flight are spared: when that token arrives, they end and free their blocks.
        """
        candidates = [request for request in self._slots.running() if self._slots.phase[request.slot] != LAST]
        self._preempt(max(candidates, key=self._waiting.urgency))

    def _preempt(self, request: Request) -> None:
        self._num_preemptions += 1
        self._preempted.append((request.seq_id,))
        self._vacate(request)
        self._waiting.push(request)

    def _advance_decodes(self, step: StepBuilder) -> None:
        """Plan one token for each decode. Decodes whose blocks are full get a new block."""
        table, batch = self._slots, step.decodes
        if step.block_slots:
            # all blocks that these slots have so far are full
            self._publish(step.block_slots)
            step.block_ids = self._blocks.grow_each(np.array(step.block_slots)).tolist()
        num_computed = table.computed[batch.slots] + 1
        table.computed[batch.slots] = num_computed
        table.stall(batch.slots)
        at_end = (num_computed >= batch.last_positions).nonzero()[0]
        if len(at_end):
            table.end(batch.slots[at_end])
        for decodes_planned in self._hooks.decodes_planned:
            decodes_planned(step)

    def _advance_chunk(self, chunk: Chunk, step: StepBuilder, *, is_first: bool = False) -> None:
        """Plan a chunk of a request in PREFILL, and allocate the blocks that the request lacks for it.

        `is_first`: whether it is the request's first one since it has got its slot.
        """
        slot = chunk.request.slot
        start = int(self._slots.computed[slot])
        computed = start + chunk.num_tokens
        for chunk_planned in self._hooks.chunk_planned:
            chunk_planned(chunk.request, start, computed, is_first=is_first)
        step.grow(slot, computed, self._blocks)
        self._slots.computed[slot] = computed
        if chunk.is_final:
            self._prefills.remove(chunk.request)
            phase = STALLED if self._slots.needs_output[slot] else DECODE
            self._slots.set_phase(slot, LAST if computed + 1 == chunk.request.max_tokens else phase)
        self._publish([slot], is_planned=True)

    def _admit_waiting(self, step: StepBuilder, budget: int) -> None:
        """Admit waiting requests, the most urgent first, until the budget, the slots or the blocks run out."""
        if self._chunks.keep_the_rest():
            return
        for ready in self._hooks.ready:
            budget = self._admit_ready(ready(), step, budget)
        while budget and len(self._waiting) and self._num_free_slots:
            request = self._waiting.peek()
            if self._is_kept_back(request):
                continue
            if self._refused == (request, self._pool.num_free) and not self._hooks.take_back_any():
                return
            if self._config.computes_whole_prompts and len(request.tokens) > budget:
                return
            request.belong_to(self._identity)
            start = Start(request)
            verdict, part = self._hooks.ask(start)
            if verdict is not Verdict.SET_ASIDE and not self._needs.has_blocks_for(start, self._prefills):
                if self._hooks.take_back_any():
                    continue
                self._refused = (request, self._pool.num_free)
                return
            if verdict is not Verdict.START:
                self._put_aside(start, part)
                continue
            chunk = self._chunks.of(request, start.num_computed, budget)
            if not chunk.num_tokens:
                return
            self._waiting.pop()
            self._start(chunk, start, step)
            budget -= chunk.num_tokens

    @property
    def _num_free_slots(self) -> int:
        """Number of slots that no request has, or waits for with its blocks."""
        return self._slots.num_free - sum(promised_slots() for promised_slots in self._hooks.promised_slots)

    def _is_kept_back(self, request: Request) -> bool:
        """Whether a part doesn't let the most urgent waiting request begin. The part has got it then."""
        for part in self._hooks.may_start:
            if not part.may_start(request):
                self._put_aside(Start(request), part)
                return True
        return False

    def _put_aside(self, start: Start, part: SchedulerPart) -> None:
        """Let a part keep the most urgent waiting request."""
        request = self._waiting.pop()
        self._set_aside[request.seq_id] = request
        part.set_aside(start)

    def _admit_ready(self, starts: Iterable[Start], step: StepBuilder, budget: int) -> int:
        """Admit requests that were set aside, before those that wait. Returns what is left of the budget."""
        for start in starts:
            if not (budget and self._slots.num_free):
                break
            if not self._needs.has_blocks_for(start, self._prefills):
                if self._hooks.take_back_any():
                    continue
                return 0  # others may not take what it needs
            chunk = self._chunks.of(start.request, start.num_computed, budget)
            if not chunk.num_tokens:
                return 0
            del self._set_aside[start.request.seq_id]
            self._start(chunk, start, step)
            budget -= chunk.num_tokens
        return budget

    def _wait_again(self, requests: Iterable[Request]) -> None:
        """Put requests that were set aside into the waiting queue."""
        for request in requests:
            del self._set_aside[request.seq_id]
            self._waiting.push(request)

    def _check_again(self) -> None:
        """Check the most urgent waiting request again, even if as many blocks are free as when there were too few."""
        self._refused = None

    def _start(self, chunk: Chunk, start: Start, step: StepBuilder) -> None:
        """Give a request a slot, and plan its first chunk."""
        request, num_computed = start.request, start.num_computed
        self._slots.enter(request, num_computed, needs_output=self._hooks.need_output(request))
        self._blocks.begin(request.slot, start.cached, start.num_loaded)
        self._prefills.append(request)
        request.num_published_blocks = start.num_published
        # a new request's first blocks are in its message to the workers; the step's lists have only later blocks
        self._blocks.grow(request.slot, num_computed + chunk.num_tokens)
        step.new_requests.append(request.for_workers(num_computed, self._blocks.rows(request.slot)))
        step.chunks.append(chunk)
        for started in self._hooks.started:
            started(start)
        self._advance_chunk(chunk, step, is_first=True)
        if not request.was_started:
            request.was_started = True
            step.started.append((request, num_computed, num_computed - start.num_published * self._block_size))

    def _publish(self, slots: list[int], *, is_planned: bool = False) -> None:
        for blocks_filled in self._hooks.blocks_filled:
            blocks_filled(slots, is_planned=is_planned)

    def _vacate(self, request: Request, *, is_over: bool = False) -> None:
        """Take away the slot and the blocks of a running request. `is_over`: whether it has ended."""
        slot = request.slot
        self._publish([slot])
        if self._slots.phase[slot] == PREFILL:
            self._prefills.remove(request)
        self._slots.leave(request)
        for left in self._hooks.left:
            left(request, slot, is_over=is_over)
        self._blocks.end(slot)
        self._freed_slots.append(slot)

    # ---- update

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest plan in flight to the requests. Returns the step's outputs."""
        step = self._in_flight.popleft()
        assert step.step == plan.step == result.step, (step.step, plan.step, result.step)
        table = self._slots
        for result_arrived in self._hooks.result_arrived:
            result_arrived(step, result)
        new = step.new_tokens(result, table)
        ends = step.find_ends(result, new, table)
        if ends and step.has_drafts:
            new = new.where(new.precede(ends))
        table.tokens[new.slots, new.positions] = new.token_ids
        table.received[new.slots] = new.positions + 1
        table.resume(new.slots)
        outputs = step.outputs(new, table) if not result.pooled else StepOutputs()  # no tokens, only results
        if self._preempted:
            outputs.preempted, self._preempted = self._preempted, []
        if step.started or result.has_extras:
            step.add_extras(outputs, result, new, table)
        for request, reason, detail in ends.values():
            outputs.finished.append(FinishedRequest(request.seq_id, reason, detail))
            self._vacate(request, is_over=True)
            del self._requests[request.seq_id]
        for result_applied in self._hooks.result_applied:
            result_applied(step, result, outputs)
        if self._failed:
            outputs.finished += self._failed
            self._failed = []
        return outputs

    def _fail(self, request: Request, why: str) -> None:
        """End a request that runs or was set aside, for the reason `why`."""
        if request.slot >= 0:
            self._vacate(request, is_over=True)
        else:
            del self._set_aside[request.seq_id]
        del self._requests[request.seq_id]
        self._failed.append(FinishedRequest(request.seq_id, "failed", why))

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants, and those of its parts. For tests."""
        self._slots.check_integrity()
        self._blocks.check_integrity([block for part in self.parts for block in part.held_blocks()])
        for part in self.parts:
            part.check_integrity()
        running, elsewhere = self._slots.running(), self._held.keys() | self._set_aside.keys()
        assert len(running) + len(self._waiting) + len(elsewhere) == len(self._requests)
        kept = [request.seq_id for part in self.parts for request in part.requests()]
        assert sorted(kept) == sorted(self._set_aside)
        waiting = [
            request for request in self._requests.values() if request.slot < 0 and request.seq_id not in elsewhere
        ]
        assert sum(len(request.tokens) for request in waiting) == self._waiting.num_tokens
        assert all(self._requests[request.seq_id] is request for request in running)
        assert {id(request) for request in self._prefills} == {
            id(request) for request in running if self._slots.phase[request.slot] == PREFILL
        }
        for request in running:
            assert self._blocks.capacity[request.slot] >= self._slots.computed[request.slot]
        self._blocks.check_seen(self._slots.computed - self._slots.uncertain)
