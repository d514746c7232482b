"""Speculation of engines with several steps in flight: workers make the drafts of a step when they compute it.

Only they know then which tokens a request has. The engine plans how many drafts there may be at most, and learns from
the result how many there were and which were right. So a step is planned while drafts of earlier ones are being
verified.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts, Ints
from raycore.parts.drafts.guesses.sources import RunningTokens
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.drafts.scheduler.worker_guesses import TRIAL_AFTER, TRIAL_TOKENS


class WorkerDrafts(Speculation):
    """Decides how many drafts workers make."""

    workers_draft = True

    def __init__(self, config: SpeculativeConfig, num_slots: int) -> None:
        super().__init__(config, num_slots)
        self._num_verified = 0
        """Of the step whose result has just arrived."""
        self._num_idle = 0
        """Number of decisions in a row to have no drafts made."""

    def propose(self, slots: Ints, running: RunningTokens, limits: Ints, budget: int, num_other: int) -> Drafts:
        """Return the maximum lengths of the drafts that the next step should have, without their tokens."""
        return self._asked(slots, limits, budget, num_other)

    @property
    def is_looking(self) -> bool:
        """Whether drafts may be made in the next step."""
        return True

    def _asked(self, slots: Ints, limits: Ints, budget: int, num_other: int) -> Drafts:
        """Return the maximum lengths of drafts that pay."""
        num_decodes, most = len(slots), self._config.num_speculative_tokens
        has_room = limits > 0
        if num_other > most * num_decodes or budget <= 0 or not has_room.any():
            return NO_DRAFTS
        slots, limits = slots[has_room], np.minimum(limits[has_room], most)
        lengths = self._choose_lengths(num_decodes, num_other, budget, slots, limits)
        if not lengths.any():
            self._num_idle += 1
            if self._num_idle < TRIAL_AFTER or self._config.fixed_length(num_decodes) is not None:
                return NO_DRAFTS
            lengths = np.minimum(limits, TRIAL_TOKENS)
            lengths[np.cumsum(lengths) > budget] = 0
        self._num_idle = 0
        return Drafts(slots, lengths, np.zeros((len(slots), 0), np.int32)).shortened(lengths)

    def count(self, slots: Ints, lengths: Ints, num_accepted: Ints) -> None:
        super().count(slots, lengths, num_accepted)
        self._num_verified = int(lengths.sum())

    def learn(self, slots: Ints, lengths: Ints, num_accepted: Ints) -> None:
        self._acceptance.learn(slots, lengths, num_accepted)

    def observe(self, num_tokens: int, has_drafts: bool, duration_s: float) -> None:
        num_verified, self._num_verified = self._num_verified, 0
        super().observe(num_tokens + num_verified, num_verified > 0, duration_s)


class DraftsAhead(WorkerDrafts):
    """For several stages and a draft model: drafts are made after a step, for the next one of its requests."""

    def __init__(self, config: SpeculativeConfig, num_slots: int) -> None:
        super().__init__(config, num_slots)
        self._next = np.zeros(num_slots, np.int64)
        """By slot: how many drafts are made after its last step."""

    def propose(self, slots: Ints, running: RunningTokens, limits: Ints, budget: int, num_other: int) -> Drafts:
        """Return the maximum lengths of the drafts that the next step should have, of those that are made by then."""
        lengths = np.minimum(self._next[slots], limits)
        lengths = np.minimum(lengths, np.maximum(budget - (np.cumsum(lengths) - lengths), 0))
        # of the next step of these slots, nothing is known but that it may be like this one
        asked = self._asked(slots, limits, budget, num_other)
        self._next[slots] = 0
        self._next[asked.slots] = asked.lengths
        return Drafts(slots, lengths, np.zeros((len(slots), 0), np.int32)).shortened(lengths)

    def next_drafts(self, slots: Ints) -> NDArray[np.int32]:
        return self._next[slots].astype(np.int32)

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        super().forget(slot, num_prompt_tokens)
        self._next[slot] = 0
