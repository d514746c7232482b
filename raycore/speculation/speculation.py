"""Speculative decoding of one rank: guesses the next tokens of its decodes, so that a step may generate several.

A step verifies those guesses that are expected to pay. Where guesses come from is in `sources` and `worker_guesses`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from raycore.messages import DraftStats
from raycore.speculation.acceptance import Acceptance, Calibration
from raycore.speculation.choice import choose_lengths
from raycore.speculation.sources import EngineGuesses, Floats, GuessSource, Ints, RunningTokens
from raycore.speculation.step_times import StepTimes
from raycore.speculative_config import SpeculativeConfig

_PLAIN_LIFETIME, _DRAFTED_LIFETIME = 400, 5000
"""Lifetimes (see `StepTimes`) of the durations of steps without drafts, and with them. Drafts are judged by the former,
and trying those costs little."""
_LOOKING_SHARE = 0.01
"""Share of the time of steps without drafts that looking for guesses in vain should take."""
_LONGEST_PAUSE = 32
"""Maximum number of steps in a row before which guesses aren't looked for. With long looks or short steps, looking then
takes more than its share."""


class Speculation:
    """The drafts of one rank's requests."""

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
        self._source = source or EngineGuesses(config, clock)
        self._acceptance = Acceptance(num_slots, config.num_speculative_tokens)
        self._calibration = Calibration()
        self._plain = StepTimes(_PLAIN_LIFETIME)
        self._drafted = StepTimes(_DRAFTED_LIFETIME, confirms_all=True)
        self._num_steps = 0
        self._looked_s = self._drafting_s = 0.0
        """How long it took to look for the next step's guesses, and to make them if that has a cost of its own."""
        self._in_vain_s = 0.0
        """`_looked_s` without the time for new prompts, if there are no drafts."""
        self._pause = 0
        """Number of steps before which guesses aren't looked for, because it took long to look for them in vain."""
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = np.zeros(config.num_speculative_tokens, np.int64)
        """By place in a draft: number of tokens that were right."""

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Note that a request has left its slot. `num_prompt_tokens`: of its tokens, the rest is output."""
        self._source.forget(slot, num_prompt_tokens)
        self._acceptance.forget(slot)

    def count(self, slots: Ints, lengths: Ints, num_accepted: Ints) -> None:
        """Count drafts that a step has verified.

        Args:
            slots: [n]: the slots that had drafts.
            lengths: [n]: the number of tokens in each draft.
            num_accepted: [n]: how many of them were right.
        """
        self._num_drafts += len(lengths)
        self._num_draft_tokens += int(lengths.sum())
        self._calibration.observe(self._acceptance.expected(slots, lengths), int(num_accepted.sum()))
        self._accepted += (num_accepted[:, None] > np.arange(len(self._accepted))).sum(axis=0)

    @property
    def stats(self) -> DraftStats:
        """What has become of the drafts so far."""
        return DraftStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted.tolist()))

    def observe(self, num_tokens: int, has_drafts: bool, duration_s: float) -> None:
        """Note how long a step took, with its planning. `num_tokens`: the tokens that it computed."""
        self._num_steps += 1
        if self._pause and not has_drafts:
            self._pause -= 1  # and nothing else, because short steps are to stay short
            return
        duration_s -= self._drafting_s
        if has_drafts:
            self._drafted.observe(self._num_steps, num_tokens, duration_s)
        else:
            duration_s -= self._looked_s
            if self._plain.knows(num_tokens):
                steps = self._in_vain_s / max(1e-9, _LOOKING_SHARE * duration_s)
                self._pause = int(min(_LONGEST_PAUSE, max(0.0, steps)))
            self._plain.observe(self._num_steps, num_tokens, duration_s)
            self._calibration.relax()
        self._looked_s = self._in_vain_s = self._drafting_s = 0.0

    @property
    def is_looking(self) -> bool:
        """Whether guesses are looked for before the next step."""
        return self._pause == 0 or self._config.num_speculative_tokens_per_batch_size is not None

    def propose(
        self, slots: NDArray[np.int64], running: RunningTokens, limits: NDArray[np.int64], budget: int, num_other: int
    ) -> dict[int, list[int]]:
        """Return the drafts that the next step should verify, by slot. Slots without drafts are left out.

        A step with more tokens of prompts than it could have drafts has none.

        Args:
            slots: [n]: the decodes of the step. All their tokens have been received.
            limits: [n]: the maximum length of each slot's draft.
            budget: the maximum length of all drafts together.
            num_other: number of tokens that the step computes for other requests.
        """
        is_full = num_other > self._config.num_speculative_tokens * len(slots)
        if not self.is_looking or is_full or budget <= 0 or not len(slots):
            return {}
        began_s = self._clock()
        self._acceptance.compare(slots, running.tokens, running.received)
        choose = partial(self._choose_lengths, len(slots), num_other, budget)
        found = self._source.guess(slots, running, limits, choose)
        for slot, guess in found.items():
            self._acceptance.note(slot, int(running.received[slot]), guess)
        drafts = self._choose(found, dict(zip(slots.tolist(), limits.tolist(), strict=True)), choose)
        self._drafting_s = self._source.drafting_s
        self._looked_s = self._clock() - began_s - self._drafting_s
        if not drafts:
            self._in_vain_s = self._looked_s - self._source.prompts_s
        return drafts

    def _choose(
        self, found: dict[int, list[int]], limits: dict[int, int], choose_lengths: Callable[[Ints, Ints], Ints]
    ) -> dict[int, list[int]]:
        """Return the beginnings of the guesses that are worth verifying. `limits`: their maximum lengths, by slot."""
        slots = np.array([slot for slot in found if limits[slot] > 0], np.int64)
        if not len(slots):
            return {}
        lengths = np.array([min(len(found[slot]), limits[slot]) for slot in slots.tolist()])
        chosen = choose_lengths(slots, lengths)
        return {
            slot: found[slot][:length] for slot, length in zip(slots.tolist(), chosen.tolist(), strict=True) if length
        }

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
        num_plain = num_decodes + num_other
        sizes = num_plain + np.arange(1, min(int(lengths.sum()), budget) + 1)
        plain_s = self._plain.estimate(self._num_steps, np.append(num_plain, sizes))
        if plain_s is None:
            return np.zeros(len(lengths), np.int64)
        drafted_s = plain_s[1:] * self._slowdowns(sizes)
        rates = self._acceptance.rates(slots)
        factor = self._calibration.factor
        return choose_lengths(lengths, rates, num_decodes, float(plain_s[0]), drafted_s, drafting_s, factor)

    def _slowdowns(self, sizes: Ints) -> Floats:
        """Return how much longer steps of these sizes take if they have drafts, at least 1.

        Prompts show how long steps of many tokens take. Where no drafts have been tried, they are taken to cost as much
        more as in the nearest size.
        """
        tried, drafted_s = self._drafted.known(self._num_steps)
        if not tried:
            return np.ones(len(sizes))
        plain_s = self._plain.estimate(self._num_steps, np.array(tried))
        assert plain_s is not None, "there are no drafts before"
        return np.maximum(1.0, np.interp(sizes, tried, np.array(drafted_s) / plain_s))
