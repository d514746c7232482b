"""Guesses that workers compute with a model. They cost time, so the engine asks only for those that should pay.

How long it takes to draft is measured. While nothing is drafted, nothing is learned about acceptance. So when drafting
hasn't paid for a while, a few tokens are drafted nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raycore.parts.drafts.config.drafter import DrafterConfig
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts, Ints
from raycore.parts.drafts.guesses.sources import ChooseLengths, Floats, RunningTokens
from raycore.parts.drafts.scheduler.step_times import AverageStepTimes
from raycore.system import time

TakeDrafts = Callable[[list[int], list[int]], list[list[int]]]
"""Gets slots, and a number of tokens for each. Returns their drafts, which may be shorter."""

TRIAL_AFTER = 32
"""Number of decisions in a row not to draft, after which there is a trial."""
TRIAL_TOKENS = 2
_LIFETIME = 2000
"""After about so many calls, it is tried again how long drafting takes for other numbers of slots."""


class WorkerGuesses:
    """Implements `GuessSource`."""

    def __init__(
        self, drafter: DrafterConfig, take: TakeDrafts, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """
        Args:
            take: has the workers draft.
            clock: returns seconds.
        """
        self._longest = drafter.num_speculative_tokens
        self._max_model_len = drafter.max_model_len
        self._take = take
        self._clock = clock
        self._times = AverageStepTimes(_LIFETIME)
        """How long it takes to draft one token for each of some slots."""
        self._num_calls = 0
        self.drafting_s = 0.0
        self.prompts_s = 0.0
        self._num_idle = 0
        """Number of decisions in a row not to draft."""

    def guess(self, slots: Ints, running: RunningTokens, limits: Ints, choose_lengths: ChooseLengths) -> Drafts:
        self.drafting_s = 0.0
        limits = np.minimum(limits, self._max_model_len - running.received[slots])
        slots, limits = slots[limits > 0], np.minimum(limits[limits > 0], self._longest)
        if not len(slots):
            return NO_DRAFTS
        lengths = choose_lengths(slots, limits, self._drafting_s(len(slots)))
        if not lengths.any():
            self._num_idle += 1
            if self._num_idle < TRIAL_AFTER:
                return NO_DRAFTS
            lengths = np.minimum(limits, TRIAL_TOKENS)
        self._num_idle = 0
        return self._draft(slots[lengths > 0], lengths[lengths > 0])

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Do nothing: plans tell the workers which requests leave their slots."""

    def _drafting_s(self, num_slots: int) -> Floats:
        known_s = self._times.estimate(self._num_calls, np.array([num_slots]))
        token_s = 0.0 if known_s is None else float(known_s[0])
        return token_s * np.arange(1.0, self._longest + 1)

    def _draft(self, slots: Ints, lengths: Ints) -> Drafts:
        began_s = self._clock()
        drafts = self._take(slots.tolist(), lengths.tolist())
        self.drafting_s = took_s = self._clock() - began_s
        self._num_calls += 1
        self._times.observe(self._num_calls, len(slots), took_s / int(lengths.max()))
        found = Drafts.of(slots.tolist(), drafts)
        return found.shortened(found.lengths)
