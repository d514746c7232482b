"""The running requests as arrays by slot, so that a step costs a few array operations however many run.

A running request is in one of three phases. They follow from its counts, and exist only to find rows quickly:

* PREFILL: more than one known token is still to be computed, or its first sampled token isn't planned yet.
* DECODE: exactly one token is to be computed: the last one sampled, whether its value has arrived or not.
* LAST: all its tokens are planned. It ends when the result arrives, at the latest.

*Known* tokens include those in flight, whose values only the workers know: `received <= known`. In DECODE `known ==
computed + 1`, so `known` is not stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycore.scheduler.request import Request

FREE, PREFILL, DECODE, LAST = range(4)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some slots in the order of a plan, with values that don't change while their requests run."""

    slots: NDArray[np.int64]
    slot_bytes: bytes
    """`slots` as int32, for the plan."""
    seq_ids: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    generations: NDArray[np.int64]
    flush_interval_s: float


class SlotTable:
    """`num_slots` rows. Counts are int64, in tokens of prompt and output."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        self.phase = np.zeros(num_slots, np.int8)
        self.computed = np.zeros(num_slots, np.int64)
        """Tokens whose computation was planned."""
        self.received = np.zeros(num_slots, np.int64)
        """Tokens whose values have arrived, in `tokens`."""
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        """How many requests have left the slot. Results planned for an earlier generation are ignored."""
        self.num_departures = 0
        """How many requests have left any slot. While it is unchanged, so are all generations."""
        self.seq_id = np.zeros(num_slots, np.int64)
        self.flush_interval_s = np.zeros(num_slots, np.float64)
        # uninitialised: the kernel allocates only the pages that requests write to
        self.tokens = np.empty((num_slots, max_model_len), np.int32)
        self.num_stoppers = np.zeros(vocab_size, np.int32)
        """By token: how many running requests it would end. One lookup rules out all but a few tokens."""
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._decodes: Batch | None = None

    @property
    def num_free(self) -> int:
        """Slots without a request."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Slots with a request."""
        return len(self.requests) - len(self._free)

    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return [request for request in self.requests if request is not None]

    def enter(self, request: Request, num_computed: int) -> None:
        """Give a request a slot, in PREFILL."""
        slot = request.slot = self._free.pop()
        num_tokens = len(request.tokens)
        self.requests[slot] = request
        self.phase[slot] = PREFILL
        self.computed[slot] = num_computed
        self.received[slot] = num_tokens
        self.max_tokens[slot] = request.max_tokens
        self.seq_id[slot] = request.seq_id
        self.flush_interval_s[slot] = request.flush_interval_s
        self.tokens[slot, :num_tokens] = request.tokens
        self.num_stoppers[list(request.stop_token_ids)] += 1

    def leave(self, request: Request) -> None:
        """Take a request's slot away. Results in flight for it will be ignored."""
        slot = request.slot
        request.tokens = np.array(self.tokens[slot, : int(self.received[slot])])
        request.slot = -1
        self.requests[slot] = None
        self.set_phase(slot, FREE)
        self.generation[slot] += 1
        self.num_departures += 1
        self.num_stoppers[list(request.stop_token_ids)] -= 1
        self._free.append(slot)

    def set_phase(self, slots: int | NDArray[np.int64], phase: int) -> None:
        """Set the phase of slots."""
        self.phase[slots] = phase
        self._decodes = None

    def decodes(self) -> Batch:
        """All slots in DECODE, in slot order."""
        if self._decodes is None:
            self._decodes = self.batch(np.flatnonzero(self.phase == DECODE))
        return self._decodes

    def batch(self, slots: NDArray[np.int64]) -> Batch:
        """A batch of these slots, in this order."""
        seq_ids = self.seq_id[slots]
        seq_ids.flags.writeable = False
        return Batch(
            slots=slots,
            slot_bytes=slots.astype(np.int32).tobytes(),
            seq_ids=seq_ids,
            max_tokens=self.max_tokens[slots],
            generations=self.generation[slots],
            flush_interval_s=float(self.flush_interval_s[slots].min(initial=math.inf)),
        )

    def check_integrity(self) -> None:
        """Assert the invariants of the phases."""
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
            assert received <= known <= request.max_tokens
            assert computed < known
            assert (known == request.max_tokens) == (phase == LAST)
            stoppers[list(request.stop_token_ids)] += 1
        assert (stoppers == self.num_stoppers).all()
