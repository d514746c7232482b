"""A step's plan while the scheduler builds it, and what the scheduler keeps of it until the result arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycore.messages import NewRequest, StepPlan, StepResult, StepTokens
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.request import Request
from raycore.scheduler.slots import Batch, SlotTable


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
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    new_requests: list[NewRequest] = field(default_factory=list[NewRequest])
    started: list[tuple[Request, int]] = field(default_factory=list[tuple[Request, int]])
    """(request, number of cached tokens) of the new requests that have never had a slot before."""
    block_slots: list[int] = field(default_factory=list[int])
    """The slots that get additional blocks: slot `block_slots[i]` gets block `block_ids[i]`."""
    block_ids: list[int] = field(default_factory=list[int])

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
        batch, sampled, num_tokens = self.decodes, None, b""
        if self.chunks:
            batch, sampled, num_tokens = self._mixed_batch(table)
        plan = StepPlan(step, batch.slot_bytes, num_tokens, freed_slots, self.new_requests)
        if self.block_slots:
            plan.new_block_slots = np.array(self.block_slots, np.int32).tobytes()
            plan.new_block_ids = np.array(self.block_ids, np.int32).tobytes()
        if tells_tokens:
            plan.tokens = _tokens_of(batch.slots, num_tokens, sampled, table)
        return plan, InFlight(step, batch, sampled, table.num_departures, self.started)

    def _mixed_batch(self, table: SlotTable) -> tuple[Batch, NDArray[np.int64] | None, bytes]:
        """Combine decodes and chunks. Slots with one token come first.

        Returns: the batch, the indexes of the slots in it that get a new token (None: all), and each slot's number of
        tokens as int32 bytes (empty: 1 each).
        """
        chunks = sorted(self.chunks, key=lambda chunk: chunk.num_tokens > 1)
        decodes = self.decodes.slots
        chunk_slots = np.array([chunk.request.slot for chunk in chunks], np.int64)
        num_tokens = np.ones(len(decodes) + len(chunks), np.int32)
        num_tokens[len(decodes) :] = [chunk.num_tokens for chunk in chunks]
        is_sampled = np.ones(len(num_tokens), np.bool_)
        is_sampled[len(decodes) :] = [chunk.is_final for chunk in chunks]
        return (
            table.batch(np.concatenate([decodes, chunk_slots])),
            None if is_sampled.all() else np.flatnonzero(is_sampled),
            b"" if num_tokens[-1] == 1 else num_tokens.tobytes(),
        )


def _tokens_of(
    slots: NDArray[np.int64], num_tokens: bytes, sampled: NDArray[np.int64] | None, table: SlotTable
) -> StepTokens:
    """Return the tokens that a plan computes. Their computation has been noted in `table`.

    Args:
        num_tokens: as in `StepPlan`.
        sampled: as in `InFlight`.
    """
    counts = np.ones(len(slots), np.int64)
    if num_tokens:
        counts = np.frombuffer(num_tokens, np.int32).astype(np.int64)
    starts = table.computed[slots] - counts
    is_sampled = np.ones(len(slots), np.int32)
    if sampled is not None:
        is_sampled[:] = 0
        is_sampled[sampled] = 1
    first_rows = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum())) + np.repeat(starts - first_rows, counts)
    token_ids = table.tokens[np.repeat(slots, counts), positions]
    return StepTokens(starts.astype(np.int32).tobytes(), is_sampled.tobytes(), token_ids.tobytes())


@dataclass(frozen=True, slots=True)
class InFlight:
    """What the scheduler keeps of a plan whose result has not arrived."""

    step: int
    batch: Batch
    sampled: NDArray[np.int64] | None
    """Indexes of the slots in the batch that get a new token. None: all."""
    num_departures: int
    """`SlotTable.num_departures` when the plan was made."""
    started: list[tuple[Request, int]]

    def live_rows(self, table: SlotTable) -> NDArray[np.int64] | None:
        """Return the indexes in the batch that get a new token and whose requests still have their slots. None: all."""
        if self.num_departures == table.num_departures:
            return self.sampled
        is_live = table.generation[self.batch.slots] == self.batch.generations
        return np.flatnonzero(is_live) if self.sampled is None else self.sampled[is_live[self.sampled]]

    def live_request(self, row: int, table: SlotTable) -> Request | None:
        """Return the request at index `row` of the batch, or None if that request has left its slot."""
        slot = int(self.batch.slots[row])
        return table.requests[slot] if table.generation[slot] == self.batch.generations[row] else None

    @staticmethod
    def failures(result: StepResult, rows: NDArray[np.int64] | None) -> dict[int, str]:
        """Return why requests failed, by index into the outputs, without requests that have left their slots.

        `rows` is what `live_rows` returned.
        """
        if rows is None:
            return dict(result.failed)
        index_of = {row: index for index, row in enumerate(rows.tolist())}
        return {index_of[row]: why for row, why in result.failed if row in index_of}

    def add_extras(
        self, outputs: StepOutputs, result: StepResult, rows: NDArray[np.int64] | None, table: SlotTable
    ) -> None:
        """Add to `outputs` the started requests that weren't aborted, and the logprobs of requests with a slot.

        Args:
            rows: what `live_rows` returned. `outputs` has the tokens of these rows.
        """
        outputs.started = [(request.seq_id, cached) for request, cached in self.started if not request.is_aborted]
        if result.logprobs:
            live = None if rows is None else set(rows.tolist())
            seq_ids = self.batch.seq_ids
            outputs.logprobs = [
                (int(seq_ids[row]), entry) for row, entry in result.logprobs if live is None or row in live
            ]
        for row, position, entries in result.prompt_logprobs:
            request = self.live_request(row, table)
            if request is None:
                continue
            # after a preemption the prompt is computed again: skip logprobs that were already sent
            fresh = entries[max(0, request.num_prompt_logprobs - position) :]
            if fresh:
                request.num_prompt_logprobs = position + len(entries)
                outputs.prompt_logprobs.append((request.seq_id, position + len(entries) - len(fresh), fresh))
