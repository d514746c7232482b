"""Plans steps, and applies their results to the requests.

There are no separate prefill and decode steps. Every request has known tokens (prompt and output) and computed tokens
(known tokens whose keys and values are in the KV cache). Each step computes known tokens of requests, within a token
budget. Running requests with exactly one token to compute (decodes) are planned first, then other running requests. The
rest of the budget goes to waiting requests, while there are free slots and blocks. While running requests need more
blocks than are free, the least urgent running request is preempted: it loses its blocks, waits again, and is computed
again later.

A step can be planned before the results of earlier steps arrive, on the assumption that each decode in flight gives one
token. Only a request whose rules depend on its output, such as a grammar, waits for its own last token. If a request
has left its slot when a result arrives (finished, aborted or preempted), the result for this request is ignored. When a
request is preempted, its tokens in flight are lost. No client has seen them, and they are sampled again with the same
random numbers. Workers execute plans in order, so the blocks of a request that has left its slot can be reused at once,
even while steps that use them are in flight.

If steps in flight are in different stages of a pipeline, running decodes take turns: each step gets a share of them and
of prompts' tokens, so that all stages have work. A decode whose last token is still being computed waits for a later
step, if there is anything else to compute.

This module knows nothing of connections, time, or tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import CacheLayout
from raycore.config import CacheConfig, SchedulerConfig
from raycore.config.multimodal import EncoderLimits
from raycore.config.states import StateRows
from raycore.errors import InvalidRequest
from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.prefix_cache import NOTHING_CACHED, CachedPrefix, PrefixCache
from raycore.messages import (
    NO_ADAPTER,
    NO_DRAFT_STATS,
    NO_EXTERNAL_HITS,
    NO_KV_FETCHES,
    EngineRequest,
    FinishedRequest,
    LoadView,
    StepPlan,
    StepResult,
    TransferResult,
    client_of,
)
from raycore.scheduler.encoder_inputs import EncoderInputs
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.policy import WaitingQueue
from raycore.scheduler.prefix_states import PrefixStates
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.request import Request, RequestLimits
from raycore.scheduler.slots import DECODE, LAST, PREFILL, STALLED, Batch, SlotTable
from raycore.scheduler.step_builder import Chunk, InFlight, NewTokens, StepBuilder
from raycore.speculation.drafts import Drafts
from raycore.speculation.speculation import Speculation

if TYPE_CHECKING:
    from raycore.config.kv_transfer import KVTransferConfig
    from raycore.kv_transfer.connector import SchedulerConnector
    from raycore.kv_transfer.events import KVCacheEvent
    from raycore.scheduler.transfers import Transfers

_SHARES_OF_PROMPTS = 4
"""With n turns, a step gets at most one of 4 n parts of all prompts' tokens, because the later stages of a pipeline
have nothing to do while the first one computes the first part."""
_LEAST_SHARE = 1 / 16
"""But this share of `max_num_batched_tokens` is never divided, because steps of few tokens are inefficient."""

_End = tuple[Request, str, int | str | None]
"""A request that ends, its finish reason and its stop reason, or why it failed."""


class Scheduler:
    """The scheduler of one data-parallel rank.

    Args:
        num_blocks: number of KV cache blocks on every worker.
        vocab_size: size of the model's vocabulary. Token ids are smaller.
        tells_tokens: whether plans tell the workers which tokens they compute. A request then waits for its last token
            before the next one is planned.
        num_turns: the number of steps that running decodes take turns in. A step then has at most 1 of `num_turns`
            equal parts of the running requests as decodes, and a share of the prompts' tokens.
        speculation: guesses the next tokens of decodes. None: nothing does.
        max_adapters: maximum number of different LoRA adapters that running requests use.
        layout: the groups of layers that share the blocks. None: there is one, which keeps all tokens.
        state_rows: the rows of states, of a model whose layers keep states. None: they don't.
        connector: the scheduler's side of the KV connector, and its settings. None: there is none.
        kv_events: gets the KV events, in order. The caller takes them out. None: nobody wants them.
        encoder: the limits of what is encoded, of a model that takes more than text. None: it doesn't.
        waits_for_output: whether each request waits for its last token before the next one is planned.
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
        speculation: Speculation | None = None,
        max_adapters: int = 0,
        layout: CacheLayout | None = None,
        state_rows: StateRows | None = None,
        connector: tuple[SchedulerConnector, KVTransferConfig] | None = None,
        kv_events: list[KVCacheEvent] | None = None,
        encoder: EncoderLimits | None = None,
        waits_for_output: bool = False,
    ) -> None:
        assert config.max_num_batched_tokens >= config.max_num_seqs, "every running request gets a token in each step"
        self._config = config
        self._tells_tokens = tells_tokens
        self._num_turns = num_turns
        self._speculation = speculation
        self._block_size = cache.block_size
        self._layout = layout
        windows = [None] if layout is None else layout.windows
        self._limits = RequestLimits(vocab_size, config.max_model_len, cache.block_size, num_blocks, layout, encoder)
        self._on_identity: list[Callable[[bytes], None]] = []
        """What each identity is told to: see `take_identity`."""
        self._encoder = EncoderInputs(encoder, self._on_identity) if encoder is not None else None
        prefix_cache = PrefixCache(cache.block_size, windows) if cache.enable_prefix_caching else None
        self._pool = BlockPool(num_blocks, prefix_cache)
        self._blocks = BlockTable(config.max_num_seqs, config.max_model_len, cache.block_size, self._pool, windows)
        waits = waits_for_output or tells_tokens
        self._slots = SlotTable(config.max_num_seqs, config.max_model_len, vocab_size, waits_for_output=waits)
        self._states: PrefixStates | None = None
        """None: nothing has to be planned for states."""
        if state_rows is not None and prefix_cache is not None:
            self._states = PrefixStates(state_rows, self._slots, cache.block_size)
        self._prefixes: Prefixes | None = None
        if prefix_cache is not None:
            self._prefixes = Prefixes(prefix_cache, self._slots, self._blocks, self._states)
        self._transfers: Transfers | None = None
        """None: there is no KV connector."""
        if connector is not None:
            from raycore.scheduler.transfers import Transfers  # imported lazily, as below: few engines need it

            assert len(windows) == 1, "connectors know blocks of all layers"
            self._transfers = Transfers(*connector, self._pool, self._slots, cache.block_size, self._on_identity)
        if self._prefixes is not None and (self._transfers is not None or kv_events is not None):
            from raycore.scheduler.cache_watch import CacheWatch

            watch = CacheWatch(self._slots, cache.block_size, len(windows), kv_events, self._transfers)
            self._prefixes.watch(watch)
        self._waiting = WaitingQueue(config.policy)
        self._held: dict[int, Request] = {}
        """Requests, by seq_id, that were submitted with `is_held` and are not in the waiting queue yet."""
        self._requests: dict[int, Request] = {}
        self._max_adapters = max_adapters
        self._adapters: Counter[int] = Counter()
        """By slot: number of running requests that use the adapter there."""
        self._without_adapter: list[int] = []
        """The seq_ids of the requests in `_held` that wait for one of `max_adapters`. In order of urgency."""
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
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._refused: tuple[Request, int] | None = None
        """(the most urgent waiting request, free blocks) when there were too few blocks for that request. While neither
        changes, the request isn't checked again."""

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
        if self._transfers is not None:
            self._transfers.add(admitted)
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
            is_held = self._held.pop(seq_id, None) is not None
            if request.slot >= 0:
                self._vacate(request, is_over=True)
            elif (self._transfers is None or not self._transfers.discard(request)) and not is_held:
                self._waiting.discard(request)

    def seq_ids_of(self, client: int) -> list[int]:
        """Return the seq_ids of all requests of the client with the index `client`."""
        return [seq_id for seq_id in self._requests if client_of(seq_id) == client]

    def seq_ids_in_flight(self, step: int) -> list[int]:
        """Return the seq_ids of the requests in the plan of `step`, without those that have left their slots since.

        Empty if `step` is not in flight.
        """
        for planned in self._in_flight:
            if planned.step == step:
                requests = (planned.live_request(row, self._slots) for row in range(len(planned.batch.slots)))
                return [request.seq_id for request in requests if request is not None]
        return []

    def has_work(self) -> bool:
        """Whether any request is waiting or running, or blocks are moved. Requests that are held back don't count."""
        return len(self._requests) > len(self._held) or self._wants_empty_step

    def load(self) -> LoadView:
        """Return the current load, and counters since the start."""
        transfers = self._transfers
        num_loading = 0 if transfers is None else transfers.num_waiting
        return LoadView(
            len(self._waiting) + len(self._held) + num_loading,
            self._slots.num_running,
            self._pool.usage,
            self._num_preemptions,
            self._num_queried_tokens,
            self._num_cached_tokens,
            len(self._held) + num_loading,
            NO_DRAFT_STATS if self._speculation is None else self._speculation.stats,
            external=NO_EXTERNAL_HITS if transfers is None else transfers.hits,
            kv_fetches=NO_KV_FETCHES if transfers is None else transfers.fetches(),
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
        if self._transfers is not None:
            self._wait_again(self._transfers.give_up_loads())
        self._pool.forget()
        if self._states is not None:
            self._states.clear()
        self._refused = None
        return True

    def reset_encoder_cache(self) -> None:
        """Have the workers drop the embeddings of all features. Requests that have begun to use some are preempted."""
        if self._encoder is not None:
            for request in self._slots.running():
                if self._encoder.uses_part(request):
                    self._preempt(request)
            self._encoder.clear()

    def take_identity(self, identity: bytes) -> None:
        """See `SchedulerProtocol`."""
        self._identity = identity
        self._refused = None
        for take in self._on_identity:
            take(identity)

    def start_over(self) -> None:
        """Preempt all running requests and clear the prefix cache, because workers have lost the cache and all slots.

        No step may be in flight.
        """
        assert not self._in_flight
        if self._transfers is not None:
            self._wait_again(self._transfers.start_over())
        self.reset_prefix_cache(reset_running_requests=True)
        if self._transfers is not None:
            self._transfers.is_cache_lost = False
        self.reset_encoder_cache()
        self._freed_slots = []  # the workers' new slots are free

    # ---- schedule

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns None if there is nothing to compute until a result or a request arrives."""
        step = self._build_step()
        if step.is_empty and self._num_turns > 1:
            step = self._build_step(only_due=False)
        if step.is_empty and not self._wants_empty_step:
            return None
        if self._num_turns > 1:
            step.note_turns(self._num_steps, self._slots)
        plan, in_flight = step.finish(self._num_steps, self._freed_slots, self._slots, tells_tokens=self._tells_tokens)
        if self._states is not None:
            plan.states = self._states.take_plan()
        if self._transfers is not None:
            self._transfers.complete(plan)
        if self._encoder is not None:
            plan.encoder = self._encoder.take_plan()
        self._num_steps += 1
        self._freed_slots = []
        self._in_flight.append(in_flight)
        return plan

    @property
    def _wants_empty_step(self) -> bool:
        """Whether a step is of use without tokens, because the KV connector has something under way."""
        return self._transfers is not None and self._transfers.wants_step()

    def _build_step(self, *, only_due: bool = True) -> StepBuilder:
        """Build the next step. `only_due`: leave out decodes whose last tokens are still being computed by stages."""
        share = self._prompt_share()
        step, has_preempted = self._fit_running(share, only_due=only_due)
        if self._speculation is not None and self._speculation.is_looking:
            self._draft(step, self._speculation)
        self._advance_decodes(step)
        budget = min(share, self._config.max_num_batched_tokens - len(step.decodes.slots) - step.num_drafts)
        for chunk in step.chunks:
            budget -= chunk.num_tokens
            self._advance_chunk(chunk, step)
        # a request that was just preempted could be admitted at once, and take back the blocks that it has lost
        if not has_preempted:
            self._admit_waiting(step, budget)
        return step

    def _prompt_share(self) -> int:
        """Return the maximum number of tokens of prompts in the next step."""
        most = self._config.max_num_batched_tokens
        if self._num_turns == 1 or (self._encoder is not None and not self._encoder.divides_features):
            return most
        table = self._slots
        num_pending = self._waiting.num_tokens + sum(
            len(request.tokens) - int(table.computed[request.slot]) for request in self._prefills
        )
        return min(most, max(-(-num_pending // (_SHARES_OF_PROMPTS * self._num_turns)), int(most * _LEAST_SHARE), 1))

    def _fit_running(self, share: int, *, only_due: bool) -> tuple[StepBuilder, bool]:
        """Begin the next step with the running requests. While there are too few free blocks for them, preempt
        requests.

        Args:
            share: maximum number of tokens of prompts.
            only_due: see `_build_step`.

        Returns: the step, and whether a request was preempted.
        """
        if self._blocks.frees_blocks:
            self._release_unseen()
        has_preempted = False
        while True:
            if self._encoder is not None:
                self._encoder.begin_try()
            step = StepBuilder(self._next_decodes(only_due=only_due))
            slots = step.decodes.slots
            is_full = self._slots.computed[slots] >= self._blocks.capacity[slots]
            step.block_slots = slots[is_full.nonzero()[0]].tolist()
            needed = len(step.block_slots) * self._blocks.num_groups
            if self._prefills:
                step.chunks = self._running_chunks(min(share, self._config.max_num_batched_tokens - len(slots)))
                needed += sum(self._num_missing_blocks(chunk) for chunk in step.chunks)
            if needed <= self._pool.num_free:
                return step, has_preempted
            if self._takes_back_blocks():
                continue
            self._preempt_one()
            has_preempted = True

    def _release_unseen(self) -> None:
        """Give back the blocks that no token sees which is planned from now on.

        The number of computed tokens of the others may still fall, if drafts turn out to be wrong.
        """
        table = self._slots
        slots = table.decodes().slots
        if self._prefills:
            slots = np.concatenate([slots, [request.slot for request in self._prefills]])
        self._blocks.release_unseen(slots, table.computed[slots])

    def take_turns(self, num_turns: int) -> None:
        """Let running decodes take turns in so many steps from now on."""
        self._num_turns = num_turns

    def _next_decodes(self, *, only_due: bool) -> Batch:
        """Return the decodes whose turn it is: those that were planned the longest ago, up to a step's share."""
        decodes = self._slots.decodes()
        if self._num_turns == 1:
            return decodes
        if only_due:
            decodes = self._slots.due(decodes, self._num_steps - self._num_turns)
        share = -(-self._slots.num_running // self._num_turns)
        return decodes if len(decodes.slots) <= share else self._slots.longest_waiting(decodes, share)

    def _running_chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self._prefills:
            if not budget:
                break
            chunk = self._chunk(request, int(self._slots.computed[request.slot]), len(request.tokens), budget)
            if chunk.num_tokens:
                budget -= chunk.num_tokens
                chunks.append(chunk)
            elif self._is_out_of_tokens:
                break
        return chunks

    @property
    def _is_out_of_tokens(self) -> bool:
        """Whether the rest of the step's tokens is kept for a feature that has more of them."""
        return self._encoder is not None and self._encoder.is_out_of_tokens

    def _chunk(self, request: Request, num_computed: int, num_known: int, budget: int) -> Chunk:
        remaining = num_known - num_computed
        longest = self._config.long_prefill_token_threshold or remaining
        num_tokens = min(remaining, longest, budget)
        if request.features and self._encoder is not None:
            limit = num_computed + min(remaining, budget)
            num_tokens = self._encoder.reach(request, num_computed, num_computed + num_tokens, limit) - num_computed
        return Chunk(request, num_tokens, num_tokens == remaining)

    def _num_missing_blocks(self, chunk: Chunk) -> int:
        slot = chunk.request.slot
        return self._blocks.num_missing(slot, int(self._slots.computed[slot]) + chunk.num_tokens)

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
        if self._states is not None:
            self._states.add_decodes(batch.slots)
        num_computed = table.computed[batch.slots] + 1
        table.computed[batch.slots] = num_computed
        table.stall(batch.slots)
        at_end = (num_computed + 1 >= batch.max_tokens).nonzero()[0]
        if len(at_end):
            table.set_phase(batch.slots[at_end], LAST)
        if step.drafts is not None:
            self._advance_drafts(step, step.drafts)

    def _draft(self, step: StepBuilder, speculation: Speculation) -> None:
        """Add drafts to the step's decodes, as far as tokens and blocks are left over."""
        table, slots = self._slots, step.decodes.slots
        num_other = sum(chunk.num_tokens for chunk in step.chunks)
        budget = self._config.max_num_batched_tokens - len(slots) - num_other
        # a draft may take a request to its last token but one, after which the last one is sampled
        limits = step.decodes.max_tokens - table.computed[slots] - 2
        drafts = speculation.propose(slots, table, limits, budget, num_other)
        if len(drafts):
            num_groups = self._blocks.num_groups
            needed = len(step.block_slots) * num_groups + sum(self._num_missing_blocks(chunk) for chunk in step.chunks)
            # leave each running request a block to grow
            num_left = self._pool.num_free - needed - table.num_running * num_groups
            drafts = self._fitting(drafts, num_left // num_groups)
        if len(drafts):
            step.drafts = drafts

    def _fitting(self, drafts: Drafts, num_blocks: int) -> Drafts:
        """Shorten drafts so that they take at most `num_blocks` more blocks of each group.

        The last token's block doesn't count.
        """
        num_tokens = self._slots.computed[drafts.slots] + 1
        room = np.maximum(self._blocks.capacity[drafts.slots] - num_tokens, -num_tokens % self._block_size)
        missing = np.maximum(0, -((room - drafts.lengths) // self._block_size))
        fits = np.cumsum(missing) <= num_blocks
        if fits.all():
            return drafts
        return drafts.shortened(np.where(fits, drafts.lengths, np.minimum(drafts.lengths, room)))

    def _advance_drafts(self, step: StepBuilder, drafts: Drafts) -> None:
        """Plan the drafts. The last tokens before them have been planned."""
        table, slots = self._slots, drafts.slots
        table.advance_over_drafts(slots, drafts.lengths)
        for slot in slots[table.computed[slots] > self._blocks.capacity[slots]].tolist():
            self._grow(slot, int(table.computed[slot]), step)

    def _grow(self, slot: int, num_tokens: int, step: StepBuilder) -> None:
        """Allocate the blocks that a slot lacks to hold `num_tokens`."""
        added = self._blocks.grow(slot, num_tokens)
        step.block_slots += [slot] * (len(added) // self._blocks.num_groups)
        step.block_ids += added

    def _advance_chunk(self, chunk: Chunk, step: StepBuilder, *, is_first: bool = False) -> None:
        """Plan a chunk of a request in PREFILL, and allocate the blocks that the request lacks for it.

        `is_first`: whether it is the request's first one since it has got its slot.
        """
        slot = chunk.request.slot
        start = int(self._slots.computed[slot])
        computed = start + chunk.num_tokens
        if self._states is not None:
            self._states.add_chunk(chunk.request, start, computed, is_first=is_first)
        if chunk.request.features and self._encoder is not None:
            self._encoder.add(chunk.request, start, computed)
        self._grow(slot, computed, step)
        self._slots.computed[slot] = computed
        if chunk.is_final:
            self._prefills.remove(chunk.request)
            phase = STALLED if self._slots.needs_output[slot] else DECODE
            self._slots.set_phase(slot, LAST if computed + 1 == chunk.request.max_tokens else phase)
        self._publish([slot], is_planned=True)

    def _admit_waiting(self, step: StepBuilder, budget: int) -> None:
        """Admit waiting requests, the most urgent first, until the budget, the slots or the blocks run out."""
        if self._encoder is not None and self._encoder.is_out_of_tokens:
            return
        if self._transfers is not None:
            budget = self._admit_loaded(self._transfers, step, budget)
        while budget and len(self._waiting) and self._num_free_slots:
            request = self._waiting.peek()
            if not self._may_use_adapter(request):
                self._held[request.seq_id] = self._waiting.pop()
                self._without_adapter.append(request.seq_id)
                continue
            if self._refused == (request, self._pool.num_free) and not self._takes_back_blocks():
                return
            if self._config.computes_whole_prompts and len(request.tokens) > budget:
                return
            request.belong_to(self._identity)
            cached = self._prefixes.find(request) if self._prefixes is not None else NOTHING_CACHED
            offer = None if self._transfers is None else self._transfers.offer(request, cached.num_blocks)
            if self._transfers is not None and offer is None:
                self._transfers.set_aside(self._waiting.pop())
                continue
            if not self._has_blocks_for(request, cached):
                if self._takes_back_blocks():
                    continue
                self._refused = (request, self._pool.num_free)
                return
            if self._transfers is not None and offer is not None and offer.is_async:
                self._waiting.pop()
                self._transfers.begin_load(request, cached, offer)
                continue
            num_loaded = 0 if offer is None else offer.num_tokens
            num_computed = cached.num_blocks * self._block_size + num_loaded
            chunk = self._chunk(request, num_computed, len(request.tokens), budget)
            if not chunk.num_tokens:
                return
            self._waiting.pop()
            self._start(chunk, cached, step, num_loaded=num_loaded)
            budget -= chunk.num_tokens

    @property
    def _num_free_slots(self) -> int:
        """Number of slots that no request has, or waits for with its blocks."""
        num_promised = 0 if self._transfers is None else self._transfers.num_promised_slots
        return self._slots.num_free - num_promised

    def _admit_loaded(self, transfers: Transfers, step: StepBuilder, budget: int) -> int:
        """Admit the requests whose blocks have arrived, before others. Returns what is left of the budget."""
        self._wait_again([*transfers.take_undecided(), *transfers.expire()])
        while budget and self._slots.num_free and (load := transfers.next_loaded()) is not None:
            if not self._has_blocks_for(load.request, load.cached):
                if self._takes_back_blocks():
                    continue
                return 0  # others may not take what it needs
            chunk = self._chunk(load.request, load.num_tokens, len(load.request.tokens), budget)
            if not chunk.num_tokens:
                return 0
            self._start(chunk, load.cached, step, load.num_tokens, load.num_cached_blocks)
            transfers.begin_loaded()
            budget -= chunk.num_tokens
        return budget

    def _takes_back_blocks(self) -> bool:
        """Take back blocks that are kept for others, because a request lacks some. Returns whether there were any."""
        return self._transfers is not None and self._transfers.take_back()

    def _wait_again(self, requests: Iterable[Request]) -> None:
        """Put requests without a slot into the waiting queue."""
        for request in requests:
            self._waiting.push(request)

    def _may_use_adapter(self, request: Request) -> bool:
        """Whether a request may begin without there being too many adapters.

        While another request waits for that, none with an adapter may begin, so that none waits forever.
        """
        if request.adapter == NO_ADAPTER:
            return True
        has_room = request.adapter in self._adapters or len(self._adapters) < self._max_adapters
        return has_room and not self._without_adapter

    def _has_blocks_for(self, request: Request, cached: CachedPrefix) -> bool:
        """Whether there are blocks for all known tokens of `request`, in addition to what running requests will need.

        Running requests need blocks for the rest of their prompts, and one block of each group to grow. If only the
        first chunk of `request` were checked, it could take blocks that later chunks of running requests need. Without
        blocks to grow, a request, usually this one, would be preempted within a few steps.
        """
        missing = self._limits.num_blocks_for(len(request.tokens)) - sum(map(len, cached.blocks))
        promised = sum(self._num_promised_blocks(other) for other in self._prefills)
        num_free_cached = sum(map(self._pool.num_free_among, cached.blocks))
        reserved = promised + self._slots.num_running * self._blocks.num_groups + num_free_cached
        if self._transfers is not None:
            reserved += self._transfers.num_promised_blocks(request, self._limits.num_blocks_for)
        return missing + reserved <= self._pool.num_free

    def _num_promised_blocks(self, request: Request) -> int:
        """Return how many more blocks a running request holds at most until all its known tokens are computed."""
        if self._layout is None or not self._blocks.frees_blocks:
            return self._blocks.num_missing(request.slot, len(request.tokens))
        most, held = self._layout.blocks_of(len(request.tokens)), self._blocks.num_held(request.slot)
        return sum(max(0, of_group - now) for of_group, now in zip(most, held, strict=True))

    def _start(
        self,
        chunk: Chunk,
        cached: CachedPrefix,
        step: StepBuilder,
        num_cached: int | None = None,
        num_published: int | None = None,
        *,
        num_loaded: int = 0,
    ) -> None:
        """Give a request a slot, and plan its first chunk.

        Args:
            cached: the blocks that it begins with.
            num_cached: how many tokens they have. None: they are full.
            num_published: how many of them are in the prefix cache. None: all.
            num_loaded: number of tokens after these, in full blocks, that the step itself loads.
        """
        request = chunk.request
        num_in_blocks = cached.num_blocks * self._block_size if num_cached is None else num_cached
        num_cached = num_in_blocks + num_loaded
        self._slots.enter(request, num_cached)
        if request.adapter != NO_ADAPTER:
            self._adapters[request.adapter] += 1
        self._blocks.begin(request.slot, cached)
        self._prefills.append(request)
        request.num_published_blocks = cached.num_blocks if num_published is None else num_published
        # a new request's first blocks are in its message to the workers; the step's lists have only later blocks
        self._blocks.grow(request.slot, num_cached + chunk.num_tokens)
        if self._transfers is not None and num_loaded:
            row = self._blocks.row(request.slot).tolist()
            self._transfers.begin_step_load(self._num_steps, request, row, cached.num_blocks, num_loaded)
        step.new_requests.append(request.for_workers(num_cached, self._blocks.rows(request.slot)))
        step.chunks.append(chunk)
        if self._states is not None:
            self._states.begin(request, cached.num_blocks)
        self._advance_chunk(chunk, step, is_first=True)
        if not request.was_started:
            request.was_started = True
            num_local = (cached.num_blocks if num_published is None else num_published) * self._block_size
            num_external = num_cached - num_local
            if self._prefixes is not None and request.reads_prefix_cache:
                self._num_queried_tokens += len(request.tokens)
                self._num_cached_tokens += num_local
                if self._transfers is not None:
                    self._transfers.count(request, len(request.tokens) - num_local, num_external)
            step.started.append((request, num_cached, num_external))

    def _publish(self, slots: list[int], *, is_planned: bool = False) -> None:
        if self._prefixes is not None:
            self._prefixes.publish(slots, is_planned=is_planned)

    def _vacate(self, request: Request, *, is_over: bool = False) -> None:
        """Take away the slot and the blocks of a running request. `is_over`: whether it has ended."""
        slot = request.slot
        self._publish([slot])
        if self._slots.phase[slot] == PREFILL:
            self._prefills.remove(request)
        self._slots.leave(request)
        if self._speculation is not None:
            self._speculation.forget(slot, request.num_prompt_tokens)
        if self._transfers is not None:
            request.num_computed_tokens = int(min(self._slots.computed[slot], self._slots.received[slot]))
            self._transfers.leave(request, self._blocks.row(slot).tolist(), is_over=is_over)
        self._blocks.end(slot)
        self._freed_slots.append(slot)
        if request.features and self._encoder is not None:
            self._encoder.leave(request)
        if request.adapter != NO_ADAPTER:
            self._leave_adapter(request.adapter)

    def _leave_adapter(self, adapter_slot: int) -> None:
        """Note that a request no longer runs with the adapter in `adapter_slot`. Let those begin that waited for it."""
        self._adapters[adapter_slot] -= 1
        if not self._adapters[adapter_slot]:
            del self._adapters[adapter_slot]
            waiting, self._without_adapter = self._without_adapter, []
            self.release(seq_id for seq_id in waiting if seq_id in self._held)

    # ---- update

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest plan in flight to the requests. Returns the step's outputs."""
        step = self._in_flight.popleft()
        assert step.step == plan.step == result.step, (step.step, plan.step, result.step)
        table = self._slots
        lost: list[FinishedRequest] = []
        if self._transfers is not None:
            lost = self._take_in_transfers(self._transfers, step.step, result.transfer)
        new = step.new_tokens(result, table)
        ends = self._find_ends(step, result, new)
        if step.drafts is not None and ends:
            new = new.where(_before_ends(new, ends))
        table.tokens[new.slots, new.positions] = new.token_ids
        table.received[new.slots] = new.positions + 1
        table.resume(new.slots)
        outputs = self._outputs(step, new) if not result.pooled else StepOutputs()  # no tokens, only results
        if self._preempted:
            outputs.preempted, self._preempted = self._preempted, []
        if step.started or result.has_extras:
            step.add_extras(outputs, result, new, table)
        for request, reason, detail in ends.values():
            outputs.finished.append(FinishedRequest(request.seq_id, reason, detail))
            self._drop(request)
        if step.drafts is not None:
            self._drop_drafts(step, step.drafts, result)
        if self._transfers is not None:
            outputs.finished += lost
            outputs.kv_transfer_params = self._transfers.take_params()
        return outputs

    def _take_in_transfers(
        self, transfers: Transfers, step: int, report: TransferResult | None
    ) -> list[FinishedRequest]:
        """Apply what workers' KV connectors report with a step. Returns the requests that fail because of it."""
        failed = [] if report is None else report.failed_blocks
        arrived, failures, others = transfers.settle(step, failed)
        if others:
            self._lose_blocks(transfers, others)
        self._publish([load.slot for load in arrived if self._slots.generation[load.slot] == load.generation])
        ended: list[Request] = []
        for request in failures:
            if transfers.fails_requests:
                self._vacate(request, is_over=True)
                ended.append(request)
            elif request.slot >= 0:
                self._preempt(request)
        if report is not None:
            ended += transfers.take_in(report)
        self._refused = None
        for request in ended:
            del self._requests[request.seq_id]
        why = "keys and values of its prompt were not loaded, and kv_load_failure_policy is 'fail'"
        return [FinishedRequest(request.seq_id, "failed", why) for request in ended]

    def _lose_blocks(self, transfers: Transfers, blocks: set[int]) -> None:
        """Compute again what follows blocks that are wrong after all. Anything in the prefix cache may follow them."""
        for request in self._slots.running():
            if not blocks.isdisjoint(self._blocks.row(request.slot).tolist()):
                request.max_published_blocks = 0
                self._preempt(request)
        self._wait_again(transfers.with_blocks(blocks))
        self._pool.forget()

    def _find_ends(self, step: InFlight, result: StepResult, new: NewTokens) -> dict[int, _End]:
        """Return the requests that end, by the index in `new` of their last token."""
        table = self._slots
        max_tokens = step.batch.max_tokens[new.rows]
        is_candidate = (table.num_stoppers[new.token_ids] > 0) | (new.positions + 1 >= max_tokens)
        if table.num_detecting:
            is_candidate |= table.detects_repetition[new.slots]
        candidates = is_candidate.nonzero()[0].tolist()
        failures: dict[int, str] = {}
        if result.failed:
            # a request fails at the last of its new tokens
            last = {row: index for index, row in enumerate(new.rows.tolist())}
            failures = {last[row]: why for row, why in result.failed if row in last}
            candidates = sorted({*candidates, *failures})
        ends: dict[int, _End] = {}
        ended_row = -1
        for index in candidates:
            if new.rows[index] == ended_row:
                continue
            request = table.requests[int(new.slots[index])]
            assert request is not None
            if index in failures:
                ends[index] = (request, "failed", failures[index])
            elif (end := request.end_of(*new.at(index))) is not None:
                ends[index] = (request, *end)
            if index in ends:
                ended_row = new.rows[index]
        return ends

    def _outputs(self, step: InFlight, new: NewTokens) -> StepOutputs:
        batch = step.batch
        if len(new.rows) == len(batch.slots) and step.drafts is None:
            return StepOutputs(seq_ids=batch.seq_ids, token_ids=new.token_ids, flush_interval_s=batch.flush_interval_s)
        flush_interval_s = float(self._slots.flush_interval_s[new.slots].min(initial=np.inf))
        return StepOutputs(seq_ids=batch.seq_ids[new.rows], token_ids=new.token_ids, flush_interval_s=flush_interval_s)

    def _drop_drafts(self, step: InFlight, drafts: Drafts, result: StepResult) -> None:
        """Count the step's drafts, and forget those that were wrong."""
        assert self._speculation is not None
        self._slots.settle(step.drafted_slots(self._slots))
        num_new = np.frombuffer(result.num_tokens, np.int32)[step.drafted].astype(np.int64)
        self._speculation.count(drafts.slots, drafts.lengths, num_new - 1)

    def _drop(self, request: Request) -> None:
        self._vacate(request, is_over=True)
        del self._requests[request.seq_id]

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants. For tests."""
        self._slots.check_integrity()
        transfers = self._transfers
        self._blocks.check_integrity(() if transfers is None else transfers.held_blocks())
        if self._states is not None:
            self._states.check_integrity()
        running = self._slots.running()
        loading = [] if transfers is None else list(transfers.requests())
        assert len(running) + len(self._waiting) + len(self._held) + len(loading) == len(self._requests)
        elsewhere = {*self._held, *(request.seq_id for request in loading)}
        if self._encoder is not None:
            self._encoder.check_integrity(running)
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
        self._blocks.check_seen(self._slots.computed)


def _before_ends(new: NewTokens, ends: Collection[int]) -> NDArray[np.bool_]:
    """Return, for each new token, whether its request has not ended before it. `ends`: indexes of last tokens."""
    is_kept = np.ones(len(new.rows), np.bool_)
    for index in ends:
        is_kept[index + 1 : np.searchsorted(new.rows, new.rows[index], "right")] = False
    return is_kept
