"""A step's plan while it is built, and what is kept of it until its result arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycore.messages import NewRequest, StepPlan, StepResult
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.request import Request
from raycore.scheduler.slots import Batch, SlotTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a request in PREFILL that one step computes."""

    request: Request
    num_tokens: int
    is_final: bool
    """Whether it includes the last known token, so that a new one is sampled."""


@dataclass(slots=True)
class StepBuilder:
    """The next plan, as far as it is decided."""

    decodes: Batch
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    new_requests: list[NewRequest] = field(default_factory=list[NewRequest])
    started: list[tuple[Request, int]] = field(default_factory=list[tuple[Request, int]])
    """(request, number of cached tokens) of the new requests that have never had a slot before."""
    block_slots: list[int] = field(default_factory=list[int])
    block_ids: list[int] = field(default_factory=list[int])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.chunks and not len(self.decodes.slots)

    def finish(self, step: int, freed_slots: list[int], table: SlotTable) -> tuple[StepPlan, InFlight]:
        """The plan to send, and what `update` needs."""
        batch, sampled, num_tokens = self.decodes, None, b""
        if self.chunks:
            batch, sampled, num_tokens = self._mixed_batch(table)
        plan = StepPlan(step, batch.slot_bytes, num_tokens, freed_slots, self.new_requests)
        if self.block_slots:
            plan.new_block_slots = np.array(self.block_slots, np.int32).tobytes()
            plan.new_block_ids = np.array(self.block_ids, np.int32).tobytes()
        return plan, InFlight(step, batch, sampled, table.num_departures, self.started)

    def _mixed_batch(self, table: SlotTable) -> tuple[Batch, NDArray[np.int64] | None, bytes]:
        """The batch, single tokens first; the indices that are sampled (None: all); each one's number of tokens (empty:
        1)."""
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


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan whose result has not arrived."""

    step: int
    batch: Batch
    sampled: NDArray[np.int64] | None
    """Indices into the batch that get a token; None means all."""
    num_departures: int
    started: list[tuple[Request, int]]

    def live_rows(self, table: SlotTable) -> NDArray[np.int64] | None:
        """Indices into the batch that get a token and whose request still has its slot; None means all."""
        if self.num_departures == table.num_departures:
            return self.sampled
        is_live = table.generation[self.batch.slots] == self.batch.generations
        return np.flatnonzero(is_live) if self.sampled is None else self.sampled[is_live[self.sampled]]

    def live_request(self, row: int, table: SlotTable) -> Request | None:
        """The request at `row` of the batch; None if it has left its slot."""
        slot = int(self.batch.slots[row])
        return table.requests[slot] if table.generation[slot] == self.batch.generations[row] else None

    @staticmethod
    def failures(result: StepResult, rows: NDArray[np.int64] | None) -> dict[int, str]:
        """By index into the outputs: why a request failed, without those that have left. `rows`: see `add_extras`."""
        if rows is None:
            return dict(result.failed)
        index_of = {row: index for index, row in enumerate(rows.tolist())}
        return {index_of[row]: why for row, why in result.failed if row in index_of}

    def add_extras(
        self, outputs: StepOutputs, result: StepResult, rows: NDArray[np.int64] | None, table: SlotTable
    ) -> None:
        """Add the started requests and the logprobs to `outputs`, without requests that have left.

        Args:
            rows: what `live_rows` returned; `outputs` has these rows' tokens.
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
