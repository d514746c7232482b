"""The running requests, in arrays indexed by slot. Planning a step of decodes takes only a few array operations.

Every running request has a slot: a row in these arrays. The request is in one of four phases, which are stored to find
rows quickly:

* PREFILL: some of the tokens that the request had when it got its slot have not been planned yet.
* DECODE: exactly one known token has not been planned: the last one sampled, whose value may still be in flight.
* STALLED: as DECODE, but the last token's value is in flight, and the next token can't be planned without it, because
  a part needs the request's output (see `SchedulerPart.needs_output`), because workers have to be told the token,
  because guesses follow it, or because the request is at its maximum length if all drafts in flight are right.
* LAST: the token that brings the request to its maximum length is in flight. The request ends when that token arrives,
  at the latest.

The *known* tokens of a request include those in flight, whose values only the workers know: `received <= known`. Their
number is not stored: it is `received` in PREFILL, and `computed + 1` in the other phases. While steps with drafts are
in flight, `computed` and `known` count the drafts as if they were right. `uncertain` says how many these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycore.messages import client_of
from raycore.scheduler.request import Request

FREE, PREFILL, DECODE, STALLED, LAST = range(5)


@dataclass(frozen=True, slots=True)
class Batch:
    """Slots in the order of a plan, with values that don't change while the slots' requests run."""

    slots: NDArray[np.int64]
    slot_bytes: bytes
    """The bytes of `slots` as an int32 array, for the plan."""
    rows: NDArray[np.int64]
    """The indexes of `slots`."""
    seq_ids: NDArray[np.int64]
    last_positions: NDArray[np.int64]
    """The position of the last token that each request may have."""
    generations: NDArray[np.int64]
    flush_interval_s: float
    only_client: int | None
    """The client of all requests. None: there are several, or no requests."""


class SlotTable:
    """The data of running requests: one row for each of `num_slots` slots. Token counts are of prompt and output."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int, *, waits_for_output: bool = False) -> None:
        """`waits_for_output`: whether every request has to wait for its last token before the next one is planned."""
        self._waits_for_output = waits_for_output
        self.phase = np.zeros(num_slots, np.int8)
        self.computed = np.zeros(num_slots, np.int64)
        """Number of tokens whose computation has been planned."""
        self.uncertain = np.zeros(num_slots, np.int64)
        """How many of these are drafts in flight."""
        self.received = np.zeros(num_slots, np.int64)
        """Number of tokens whose values have arrived. The values are in `tokens`."""
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        """Number of requests that have left the slot. Results planned for an earlier generation are ignored."""
        self.needs_output = np.zeros(num_slots, np.bool_)
        """Whether the request's next token can only be planned when the last one has arrived."""
        self.last_step = np.zeros(num_slots, np.int64)
        """The last step in which the slot was planned. Only kept up to date if decodes take turns."""
        self.num_departures = 0
        """Number of requests that have left any slot. While this is unchanged, all generations are unchanged."""
        self.seq_id = np.zeros(num_slots, np.int64)
        self.flush_interval_s = np.zeros(num_slots, np.float64)
        # not initialized, so that the kernel allocates only the pages that requests write to; a prompt that is pooled
        # may have max_model_len tokens, and gets one more, which stands for its result
        self.tokens = np.empty((num_slots, max_model_len + 1), np.int32)
        self.num_stoppers = np.zeros(vocab_size, np.int32)
        """By token id: the number of running requests that this token would end. It is 0 for almost all tokens."""
        self.is_stopper = np.zeros(vocab_size, np.bool_)
        """By token id: whether it would end any."""
        self.detects_repetition = np.zeros(num_slots, np.bool_)
        """Whether any token may end the request, because it repeats earlier ones."""
        self.num_detecting = 0
        """Number of running requests of which any token may end them."""
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_needing_output = 0
        """Number of running requests with `needs_output`."""
        self._decodes: Batch | None = None

    @property
    def num_free(self) -> int:
        """Number of slots without a request."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Number of slots with a request."""
        return len(self.requests) - len(self._free)

    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return [request for request in self.requests if request is not None]

    def enter(self, request: Request, num_computed: int, *, needs_output: bool) -> None:
        """Give a request a free slot, in the phase PREFILL.

        Args:
            num_computed: so many of its tokens are in cached blocks.
            needs_output: whether its next token can only be planned when the last one has arrived.
        """
        slot = request.slot = self._free.pop()
        num_tokens = len(request.tokens)
        self.requests[slot] = request
        self.phase[slot] = PREFILL
        self.computed[slot] = num_computed
        self.uncertain[slot] = 0
        self.received[slot] = num_tokens
        self.max_tokens[slot] = request.max_tokens
        self.needs_output[slot] = waits = self._waits_for_output or needs_output
        self._num_needing_output += waits
        self.seq_id[slot] = request.seq_id
        self.flush_interval_s[slot] = request.flush_interval_s
        self.tokens[slot, :num_tokens] = request.tokens
        stoppers = list(request.stop_token_ids)
        self.num_stoppers[stoppers] += 1
        self.is_stopper[stoppers] = True
        self.detects_repetition[slot] = detects = request.repetition is not None
        self.num_detecting += detects

    def leave(self, request: Request) -> None:
        """Take a request's slot away, and store the received tokens in the request. Ignore its results in flight."""
        slot = request.slot
        request.tokens = np.array(self.tokens[slot, : int(self.received[slot])])
        request.slot = -1
        self.requests[slot] = None
        self.set_phase(slot, FREE)
        self.generation[slot] += 1
        self.num_departures += 1
        stoppers = list(request.stop_token_ids)
        self.num_stoppers[stoppers] -= 1
        self.is_stopper[stoppers] = self.num_stoppers[stoppers] > 0
        self.num_detecting -= request.repetition is not None
        self._num_needing_output -= int(self.needs_output[slot])
        self._free.append(slot)

    def set_phase(self, slots: int | NDArray[np.int64], phase: int) -> None:
        """Set the phase of one slot or several."""
        self.phase[slots] = phase
        self._decodes = None

    def least_computed(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of these slots have been computed if all drafts in flight are wrong."""
        return self.computed[slots] - self.uncertain[slots]

    def end(self, slots: NDArray[np.int64]) -> None:
        """Note that these slots are at their maximum length, if all their drafts in flight are right."""
        self.phase[slots] = np.where(self.uncertain[slots], STALLED, LAST)
        self._decodes = None

    def stall(self, slots: NDArray[np.int64]) -> None:
        """Note that a token of these slots, in the phase DECODE, is in flight."""
        if self._num_needing_output and self.needs_output[slots].any():
            self.set_phase(slots[self.needs_output[slots]], STALLED)

    def resume(self, slots: NDArray[np.int64]) -> None:
        """Note that tokens of these slots have arrived."""
        if self._num_needing_output:
            stalled = slots[self.phase[slots] == STALLED]
            stalled = stalled[self.received[stalled] > self.computed[stalled]]
            if len(stalled):
                self.set_phase(stalled, DECODE)

    def advance_over_drafts(
        self, slots: NDArray[np.int64], lengths: NDArray[np.int64], *, waits_for_result: bool
    ) -> None:
        """Note that a step computes drafts of up to these lengths after the last tokens of slots.

        `waits_for_result`: whether the next tokens can only be planned when it is known which drafts were right.
        """
        self.computed[slots] += lengths
        self.uncertain[slots] += lengths
        stalled = slots if waits_for_result else slots[self.computed[slots] + 1 >= self.max_tokens[slots]]
        if len(stalled):
            self.set_phase(stalled, STALLED)

    def settle(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Note that the result of a step with drafts of up to these lengths has arrived. Wrong ones no longer count."""
        self.uncertain[slots] -= lengths
        self.computed[slots] -= lengths - num_right
        stalled = slots[self.phase[slots] == STALLED]
        has_room = ~self.needs_output[stalled] & (self.computed[stalled] + 1 < self.max_tokens[stalled])
        stalled = stalled[has_room | (self.received[stalled] > self.computed[stalled])]
        if len(stalled):
            self.set_phase(stalled, DECODE)

    def decodes(self) -> Batch:
        """Return all slots in the phase DECODE, in ascending order."""
        if self._decodes is None:
            self._decodes = self.batch(np.flatnonzero(self.phase == DECODE))
        return self._decodes

    def due(self, batch: Batch, step: int) -> Batch:
        """Return the slots of `batch` whose last token has arrived, or was planned in `step` or before."""
        slots = batch.slots
        is_due = (self.last_step[slots] <= step) | (self.received[slots] > self.computed[slots])
        return batch if is_due.all() else self.batch(slots[is_due])

    def longest_waiting(self, batch: Batch, num_slots: int) -> Batch:
        """Return the `num_slots` slots of `batch` whose last step is the longest ago, in ascending order."""
        in_turn = np.argsort(self.last_step[batch.slots], kind="stable")
        return self.batch(np.sort(batch.slots[in_turn[:num_slots]]))

    def batch(self, slots: NDArray[np.int64]) -> Batch:
        """Return a batch of these slots, in this order."""
        seq_ids = self.seq_id[slots]
        seq_ids.flags.writeable = False
        clients = client_of(seq_ids)
        return Batch(
            slots=slots,
            slot_bytes=slots.astype(np.int32).tobytes(),
            rows=np.arange(len(slots)),
            seq_ids=seq_ids,
            last_positions=self.max_tokens[slots] - 1,
            generations=self.generation[slots],
            flush_interval_s=float(self.flush_interval_s[slots].min(initial=math.inf)),
            only_client=int(clients[0]) if len(clients) and (clients == clients[0]).all() else None,
        )

    def check_integrity(self) -> None:
        """Assert that the rows agree with their phases. For tests."""
        taken = [slot for slot, request in enumerate(self.requests) if request is not None]
        assert sorted(taken + self._free) == list(range(len(self.requests)))
        assert np.flatnonzero(self.phase != FREE).tolist() == taken
        stoppers = np.zeros_like(self.num_stoppers)
        for slot in taken:
            request, phase = self.requests[slot], self.phase[slot]
            assert request is not None
            assert request.slot == slot
            assert request.seq_id == self.seq_id[slot]
            computed, received = int(self.computed[slot]), int(self.received[slot])
            known = received if phase == PREFILL else computed + 1
            uncertain = int(self.uncertain[slot])
            assert 0 <= uncertain <= max(0, computed - received + 1)
            assert received <= known - uncertain
            assert known <= request.max_tokens
            assert computed < known
            assert phase in (LAST, STALLED) or known < request.max_tokens
            assert phase != LAST or known == request.max_tokens
            stoppers[list(request.stop_token_ids)] += 1
        assert (stoppers == self.num_stoppers).all()
        assert ((stoppers > 0) == self.is_stopper).all()
        assert self.num_detecting == sum(request.repetition is not None for request in self.running())
