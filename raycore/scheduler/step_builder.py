"""A step's plan while the scheduler builds it, and what the scheduler keeps of it until the result
arrives, and what of that result is new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from raycore.kvcache.block_table import BlockTable
from raycore.messages import NewRequest, StepPlan, StepResult, StepTokens
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.request import Request
from raycore.scheduler.slots import Batch, SlotTable

_EntryT = TypeVar("_EntryT")
_End = tuple[Request, str, int | str | None]
"""A request that ends, its finish reason and its stop reason, or why it failed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a request in the phase PREFILL (see `slots`) that one step computes."""

    request: Request
    num_tokens: int
    is_final: bool
    """Whether the chunk includes the request's last known token, so that the step samples a new token."""


@dataclass(slots=True)
class StepBuilder:
    """Collects what the next step computes. `finish` then makes the plan."""

    decodes: Batch
    drafts: Drafts = NO_DRAFTS
    """Of some of `decodes`, each of at least one token. The step verifies them."""
    num_drafts: int = 0
    """Number of tokens in all drafts. If workers make them, at most so many."""
    workers_draft: bool = False
    """Whether workers make the drafts. Of `drafts`, only the lengths are known then, which are maxima."""
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    new_requests: list[NewRequest] = field(default_factory=list[NewRequest])
    started: list[tuple[Request, int, int]] = field(default_factory=list[tuple[Request, int, int]])
    """(request, number of cached tokens, how many of them a KV connector brought) of the new requests that have never
    had a slot before."""
    block_slots: list[int] = field(default_factory=list[int])
    """The slots that get additional blocks, each one of each group of layers."""
    block_ids: list[int] = field(default_factory=list[int])
    """These blocks, slot after slot."""
    _num_before_drafts: int = 0
    """Number of slots in the batch before those with drafts."""

    def add_drafts(self, drafts: Drafts, *, workers_draft: bool) -> None:
        """Verify these drafts."""
        self.drafts, self.num_drafts, self.workers_draft = drafts, int(drafts.lengths.sum()), workers_draft

    def num_missing_blocks(self, table: SlotTable, blocks: BlockTable) -> int:
        """Return how many blocks the requests of the step's chunks lack for these."""
        return sum(
            blocks.num_missing(chunk.request.slot, int(table.computed[chunk.request.slot]) + chunk.num_tokens)
            for chunk in self.chunks
        )

    def grow(self, slot: int, num_tokens: int, blocks: BlockTable) -> None:
        """Allocate the blocks that a slot lacks to hold `num_tokens`."""
        added = blocks.grow(slot, num_tokens)
        self.block_slots += [slot] * (len(added) // blocks.num_groups)
        self.block_ids += added

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.chunks and not len(self.decodes.slots)

    def note_turns(self, step: int, table: SlotTable) -> None:
        """Note that the slots have had their turn in this step."""
        table.last_step[self.decodes.slots] = step
        table.last_step[[chunk.request.slot for chunk in self.chunks]] = step

    def finish(
        self, step: int, freed_slots: list[int], table: SlotTable, *, tells_tokens: bool
    ) -> tuple[StepPlan, InFlight]:
        """Return the plan for the workers, and what `Scheduler.update` needs to apply the step's result.

        `tells_tokens`: whether the plan tells the workers which tokens it computes.
        """
        batch, num_tokens, num_sampled = self.decodes, b"", None
        if self.chunks or self.num_drafts:
            batch, num_tokens, num_sampled = self._mixed_batch(table)
        plan = StepPlan(step, batch.slot_bytes, num_tokens, freed_slots, self.new_requests)
        if self.block_slots:
            plan.new_block_slots = np.array(self.block_slots, np.int32).tobytes()
            plan.new_block_ids = np.array(self.block_ids, np.int32).tobytes()
        drafted = slice(self._num_before_drafts, self._num_before_drafts + len(self.drafts.slots))
        has_drafts = self.num_drafts > 0
        if self.workers_draft:
            max_drafts = np.zeros(len(batch.slots), np.int32)
            max_drafts[drafted] = self.drafts.lengths
            plan.max_drafts = max_drafts.tobytes()
        elif tells_tokens or has_drafts:
            plan.tokens = self._tokens_of(batch.slots, num_tokens, num_sampled, table)
        return plan, InFlight(step, batch, table.num_departures, self.started, self.drafts, drafted, has_drafts)

    def _mixed_batch(self, table: SlotTable) -> tuple[Batch, bytes, NDArray[np.int32]]:
        """Combine decodes and chunks. Slots with one token come first.

        Returns: the batch, each slot's number of tokens, without drafts that workers make, as int32 bytes (empty: 1
        each), and after how many of them, the last ones, a new token is sampled.
        """
        chunks = sorted(self.chunks, key=lambda chunk: chunk.num_tokens > 1)
        num_single = sum(chunk.num_tokens == 1 for chunk in chunks)
        chunk_slots = np.array([chunk.request.slot for chunk in chunks], np.int64)
        chunk_tokens = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        is_final = np.array([chunk.is_final for chunk in chunks], np.int32)
        decodes, drafts = self.decodes.slots, self.drafts
        if len(drafts.slots):
            decodes = np.delete(decodes, np.searchsorted(decodes, drafts.slots))
        ones, with_drafts = np.ones(len(decodes), np.int32), np.ones(len(drafts.slots), np.int32)
        if not self.workers_draft:
            with_drafts += drafts.lengths.astype(np.int32)
        slots = [decodes, chunk_slots[:num_single], drafts.slots, chunk_slots[num_single:]]
        num_tokens = np.concatenate([ones, chunk_tokens[:num_single], with_drafts, chunk_tokens[num_single:]])
        num_sampled = np.concatenate([ones, is_final[:num_single], with_drafts, is_final[num_single:]])
        self._num_before_drafts = len(decodes) + num_single
        batch = table.batch(np.concatenate(slots))
        return batch, b"" if num_tokens[-1] == 1 else num_tokens.tobytes(), num_sampled

    def _tokens_of(
        self, slots: NDArray[np.int64], num_tokens: bytes, num_sampled: NDArray[np.int32] | None, table: SlotTable
    ) -> StepTokens:
        """Return the tokens that a plan computes. Their computation has been noted in `table`.

        Args:
            num_tokens: as in `StepPlan`.
            num_sampled: as in `StepTokens`. None: 1 each.
        """
        counts = np.ones(len(slots), np.int64)
        if num_tokens:
            counts = np.frombuffer(num_tokens, np.int32).astype(np.int64)
        if num_sampled is None:
            num_sampled = np.ones(len(slots), np.int32)
        starts = table.computed[slots] - counts
        first_rows = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - first_rows, counts)
        token_ids = table.tokens[np.repeat(slots, counts), positions]
        if self.num_drafts:
            lengths = self.drafts.lengths
            rows = first_rows[self._num_before_drafts :][: len(lengths)] + 1
            token_ids[np.repeat(rows, lengths) + self.drafts.offsets] = self.drafts.token_ids
        return StepTokens(starts.astype(np.int32).tobytes(), num_sampled.tobytes(), token_ids.tobytes())


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of a step's requests, without those of requests that have left their slots."""

    rows: NDArray[np.int64]
    """[k]: the index in the batch of each token's slot, ascending."""
    slots: NDArray[np.int64]
    """[k]: each token's slot."""
    positions: NDArray[np.int64]
    """[k]: each token's position in its sequence."""
    token_ids: NDArray[np.int32]
    """[k]"""

    def at(self, index: int) -> tuple[int, int]:
        """Return a token, and the length of its sequence with this token."""
        return int(self.token_ids[index]), int(self.positions[index]) + 1

    def precede(self, ends: Collection[int]) -> NDArray[np.bool_]:
        """Return, for each token, whether its request hasn't ended before it. `ends`: indexes of last tokens."""
        is_kept = np.ones(len(self.rows), np.bool_)
        for index in ends:
            is_kept[index + 1 : np.searchsorted(self.rows, self.rows[index], "right")] = False
        return is_kept

    def where(self, is_kept: NDArray[np.bool_]) -> NewTokens:
        """Return the tokens for which `is_kept` is true."""
        return NewTokens(self.rows[is_kept], self.slots[is_kept], self.positions[is_kept], self.token_ids[is_kept])


@dataclass(frozen=True, slots=True)
class InFlight:
    """What the scheduler keeps of a plan whose result has not arrived."""

    step: int
    batch: Batch
    num_departures: int
    """`SlotTable.num_departures` when the plan was made."""
    started: list[tuple[Request, int, int]]
    drafts: Drafts
    drafted: slice
    """Where the slots with drafts are in the batch."""
    has_drafts: bool

    def new_tokens(self, result: StepResult, table: SlotTable) -> NewTokens:
        """Return the new tokens of requests that still have their slots."""
        batch, token_ids = self.batch, np.frombuffer(result.token_ids, np.int32)
        if result.num_tokens:
            counts = np.frombuffer(result.num_tokens, np.int32)
            rows = np.repeat(np.arange(len(counts)), counts)
            slots = batch.slots[rows]
            offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            new = NewTokens(rows, slots, table.received[slots] + offsets, token_ids)
        else:
            new = NewTokens(batch.rows, batch.slots, table.received[batch.slots], token_ids)
        if self.num_departures == table.num_departures:
            return new
        return new.where(table.generation[new.slots] == batch.generations[new.rows])

    def find_ends(self, result: StepResult, new: NewTokens, table: SlotTable) -> dict[int, _End]:
        """Return the requests that end, by the index in `new` of their last token."""
        # as few operations as can be: kernels empty the caches, and then each operation's code is read from memory
        is_candidate = table.is_stopper[new.token_ids] | (new.positions >= self.batch.last_positions[new.rows])
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

    def outputs(self, new: NewTokens, table: SlotTable) -> StepOutputs:
        """Return the outputs that have the tokens in `new`."""
        batch = self.batch
        if len(new.rows) == len(batch.slots) and not self.has_drafts:
            seq_ids, flush_interval_s = batch.seq_ids, batch.flush_interval_s
        else:
            seq_ids = batch.seq_ids[new.rows]
            flush_interval_s = float(table.flush_interval_s[new.slots].min(initial=np.inf))
        return StepOutputs(
            seq_ids=seq_ids,
            token_ids=new.token_ids,
            flush_interval_s=flush_interval_s,
            only_client=batch.only_client,
        )

    def live_request(self, row: int, table: SlotTable) -> Request | None:
        """Return the request at index `row` of the batch, or None if that request has left its slot."""
        slot = int(self.batch.slots[row])
        return table.requests[slot] if table.generation[slot] == self.batch.generations[row] else None

    def seq_ids(self, table: SlotTable) -> list[int]:
        """Return the seq_ids of the batch's requests that still have their slots."""
        requests = (self.live_request(row, table) for row in range(len(self.batch.slots)))
        return [request.seq_id for request in requests if request is not None]

    def is_live(self, table: SlotTable) -> NDArray[np.bool_]:
        """Return, for each slot with drafts, whether its request still has it."""
        return table.generation[self.drafts.slots] == self.batch.generations[self.drafted]

    def num_new(self, result: StepResult) -> NDArray[np.int64]:
        """Return the number of new tokens of each slot with drafts."""
        if not result.num_tokens:
            return np.ones(len(self.drafts.slots), np.int64)
        return np.frombuffer(result.num_tokens, np.int32)[self.drafted].astype(np.int64)

    def add_extras(self, outputs: StepOutputs, result: StepResult, new: NewTokens, table: SlotTable) -> None:
        """Add to `outputs` the started requests that weren't aborted, the logprobs of the tokens in `new` and those of
        prompts, results of pooling, and what parts report."""
        for request, num_cached, num_external in self.started:
            if not request.is_aborted:
                outputs.started.append((request.seq_id, num_cached))
                if num_external:
                    outputs.external.append((request.seq_id, num_external))
        outputs.logprobs += self._of_tokens(result.logprobs, new)
        outputs.pooled += self._of_tokens(result.pooled, new)
        # after a preemption the prompt is computed again: skip what was already sent
        for row, first, entries in result.prompt_logprobs:
            request = self.live_request(row, table)
            if request is not None and request.num_prompt_logprobs < first + len(entries):
                sent, request.num_prompt_logprobs = request.num_prompt_logprobs, first + len(entries)
                outputs.prompt_logprobs.append((request.seq_id, max(first, sent), entries[max(0, sent - first) :]))
        for row, report in result.reports:
            request = self.live_request(row, table)
            if request is not None:
                outputs.reports.append((request.seq_id, report))

    def _of_tokens(self, entries: list[tuple[int, _EntryT]], new: NewTokens) -> Iterator[tuple[int, _EntryT]]:
        """Yield (seq_id, entry) for those entries of a result, by row, that are for the tokens in `new`."""
        num_left: Counter[int] = Counter(new.rows.tolist() if entries else ())
        for row, entry in entries:
            if num_left[row]:
                num_left[row] -= 1
                yield int(self.batch.seq_ids[row]), entry
