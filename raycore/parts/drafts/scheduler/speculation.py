"""Speculative decoding of one rank: guesses the next tokens of its decodes, so that a step may generate several.

A step verifies those guesses that are expected to pay. Where guesses come from is in `guesses` and `worker_guesses`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from raycore.messages import DraftStats
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts, Ints
from raycore.parts.drafts.guesses.from_tokens import guesses_from_tokens
from raycore.parts.drafts.guesses.sources import Floats, GuessSource, RunningTokens
from raycore.parts.drafts.scheduler.acceptance import Acceptance, Calibration
from raycore.parts.drafts.scheduler.choice import LEAST_GAIN, choose_lengths
from raycore.parts.drafts.scheduler.step_times import AverageStepTimes
from raycore.system import time

_PLAIN_LIFETIME, _DRAFTED_LIFETIME = 400, 5000
"""Lifetimes (see `AverageStepTimes`) of the durations of steps without drafts, and with them. Drafts are judged by the
former, and trying those costs little."""
_LOOKING_FRACTION = 0.005
"""Fraction of the time of steps without drafts that looking for guesses in vain should take."""
_LOOK_WEIGHT = 0.1
"""Weight of a new duration in the average time of such a look."""
_LONGEST_PAUSE = 64
"""Maximum number of steps in a row before which guesses aren't looked for. With long looks or short steps, looking then
takes more than that."""


class Speculation:
    """The drafts of one rank's requests."""

    workers_draft = False
    """Whether workers make the drafts of a step when they compute it."""

    def __init__(
        self,
        config: SpeculativeConfig,
        num_slots: int,
        source: GuessSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            source: makes the guesses. None: the engine does, as `config` says.
            clock: returns seconds.
        """
        self._clock = clock
        self._config = config
        self._source = source or guesses_from_tokens(config, clock)
        self._acceptance = Acceptance(num_slots, config.num_speculative_tokens)
        self._calibration = Calibration()
        self._plain = AverageStepTimes(_PLAIN_LIFETIME)
        self._drafted = AverageStepTimes(_DRAFTED_LIFETIME, confirms_all=True)
        self._look_s: float | None = None
        """How long it takes to look for guesses in vain, on average, without the time for new prompts."""
        self._num_steps = 0
        self._looked_s = self._drafting_s = 0.0
        """How long it took to look for the next step's guesses, and to make them if that has a cost of its own."""
        self._num_in_vain, self._in_vain_s = 0, 0.0
        """Number of slots for which guesses have just been looked for in vain, and how long that took."""
        self._pause = self._pause_of_each = 0.0
        """Number of steps before which guesses aren't looked for, because it took long to look for them in vain. And by
        how much a request that leaves shortens it, because it makes room for one that hasn't been looked at."""
        self._accepted = np.zeros(config.num_speculative_tokens, np.int64)
        """By position in a draft: number of tokens that were right."""
        self.stats = DraftStats(0, 0, tuple(self._accepted.tolist()))
        """What has become of the drafts so far."""

    def next_drafts(self, slots: Ints) -> NDArray[np.int32]:
        """Return how many drafts workers make after a step, for the next one of each of its slots."""
        return np.zeros(len(slots), np.int32)

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Note that a request has left its slot. `num_prompt_tokens`: of its tokens, the rest is output."""
        self._source.forget(slot, num_prompt_tokens)
        self._acceptance.forget(slot)
        self._pause -= self._pause_of_each

    def count(self, slots: Ints, lengths: Ints, num_accepted: Ints) -> None:
        """Count drafts that a step has verified.

        Args:
            slots: [n]: the slots that had drafts.
            lengths: [n]: the number of tokens in each draft.
            num_accepted: [n]: how many of them were right.
        """
        self._calibration.observe(self._acceptance.expected(slots, lengths), int(num_accepted.sum()))
        self._accepted += (num_accepted[:, None] > np.arange(len(self._accepted))).sum(axis=0)
        num_drafts, num_tokens = self.stats.num_drafts + len(lengths), self.stats.num_draft_tokens + int(lengths.sum())
        self.stats = DraftStats(num_drafts, num_tokens, tuple(self._accepted.tolist()))

    def learn(self, slots: Ints, lengths: Ints, num_accepted: Ints) -> None:
        """Learn from verified drafts of requests that still run. The arguments are those of `count`.

        Does nothing here: guesses are compared with what came before the next ones are made.
        """

    def observe(self, num_tokens: int, has_drafts: bool, duration_s: float) -> None:
        """Note how long a step took, with its planning. `num_tokens`: the tokens that it computed."""
        self._num_steps += 1
        if not (self.is_looking or has_drafts):
            self._pause -= 1  # and nothing else, because short steps are to stay short
            return
        began_s = self._clock()
        duration_s -= self._drafting_s
        if has_drafts:
            self._drafted.observe(self._num_steps, num_tokens, duration_s)
        else:
            duration_s -= self._looked_s
            self._plain.observe(self._num_steps, num_tokens, duration_s)
            self._calibration.relax()
            if self._num_in_vain and self._plain.knows(num_tokens):
                self._begin_pause(self._in_vain_s + self._clock() - began_s, duration_s)
        self._looked_s = self._drafting_s = 0.0
        self._num_in_vain = 0

    def _begin_pause(self, look_s: float, duration_s: float) -> None:
        """Look for no guesses for a while, because it was in vain and took `look_s`.

        `duration_s`: how long a step takes without that.
        """
        average_s = self._look_s or look_s
        # other threads may interrupt a look
        self._look_s = average_s + _LOOK_WEIGHT * (min(look_s, 2 * average_s) - average_s)
        self._pause = min(_LONGEST_PAUSE, self._look_s / max(1e-9, _LOOKING_FRACTION * duration_s))
        self._pause_of_each = self._pause / self._num_in_vain

    @property
    def is_looking(self) -> bool:
        """Whether guesses are looked for before the next step."""
        return self._pause < 1 or self._config.num_speculative_tokens_per_batch_size is not None

    def propose(self, slots: Ints, running: RunningTokens, limits: Ints, budget: int, num_other: int) -> Drafts:
        """Return the drafts that the next step should verify.

        A step with more tokens of prompts than it could have drafts has none.

        Args:
            slots: [n], ascending: the decodes of the step. All their tokens have been received.
            limits: [n]: the maximum length of each slot's draft.
            budget: the maximum length of all drafts together.
            num_other: number of tokens that the step computes for other requests.
        """
        num_decodes = len(slots)
        is_full = num_other > self._config.num_speculative_tokens * num_decodes
        has_room = limits > 0
        if not self.is_looking or is_full or budget <= 0 or not has_room.any():
            return NO_DRAFTS
        began_s = self._clock()
        slots, limits = slots[has_room], limits[has_room]
        self._acceptance.compare(slots, running.tokens, running.received)
        choose = partial(self._choose_lengths, num_decodes, num_other, budget)
        found = self._source.guess(slots, running, limits, choose)
        drafts = NO_DRAFTS
        if len(found):
            self._acceptance.note(found, running.received[found.slots])
            possible = np.minimum(limits[np.searchsorted(slots, found.slots)], found.lengths)
            drafts = found.shortened(choose(found.slots, possible))
        self._drafting_s = self._source.drafting_s
        self._looked_s = self._clock() - began_s - self._drafting_s
        if not len(drafts):
            self._num_in_vain = len(slots)
            self._in_vain_s = self._looked_s - self._source.prompts_s
        return drafts

    def _choose_lengths(
        self,
        num_decodes: int,
        num_other: int,
        budget: int,
        slots: Ints,
        lengths: Ints,
        drafting_s: Floats | None = None,
    ) -> Ints:
        """Return how many tokens of each slot's guess are worth verifying, and making, if `drafting_s` is given.

        Without `num_speculative_tokens_per_batch_size`, none are before it is known how long steps take without drafts.
        """
        fixed = self._config.fixed_length(num_decodes)
        if fixed is not None:
            lengths = np.minimum(lengths, fixed)
            left = budget - (np.cumsum(lengths) - lengths)
            return np.minimum(lengths, np.maximum(left, 0))
        factor = self._calibration.factor
        if factor * self._acceptance.expected(slots, lengths) < (LEAST_GAIN - 1) * num_decodes:
            return np.zeros(len(lengths), np.int64)  # even if guesses cost nothing
        num_plain = num_decodes + num_other
        tried, tried_s = self._drafted.known(self._num_steps)
        sizes = num_plain + np.arange(min(int(lengths.sum()), budget) + 1)
        plain_s = self._plain.estimate(self._num_steps, np.append(sizes, tried))
        if plain_s is None:
            return np.zeros(len(lengths), np.int64)
        drafted_s = plain_s[1 : len(sizes)]
        if tried:
            # Prompts show how long steps of many tokens take, and drafts make them longer, where they were tried. Where
            # they weren't, they are taken to cost as much more as in the nearest size.
            slowdowns = np.interp(sizes[1:], tried, tried_s / plain_s[len(sizes) :])
            drafted_s = drafted_s * np.maximum(1.0, slowdowns)
        rates = self._acceptance.rates(slots)
        return choose_lengths(lengths, rates, num_decodes, float(plain_s[0]), drafted_s, drafting_s, factor)
